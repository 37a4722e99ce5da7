"""Fifty JSON schemas whose every value is bounded, what to ask for each, and a checker for the keywords they use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]


def text(longest: int = 12, **more: Any) -> Schema:
    return {"type": "string", "maxLength": longest, **more}


def whole(low: int = 0, high: int = 100) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def some(items: Schema, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def record(required: list[str] | None = None, **properties: Schema) -> Schema:
    """A closed object; all properties are required unless some are named."""
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


def pattern(expression: str) -> Schema:
    return {"type": "string", "pattern": expression}


YES: Schema = {"type": "boolean"}
NONE: Schema = {"type": "null"}
COLOR: Schema = {"enum": ["red", "green", "blue"]}

SCHEMAS: dict[str, Schema] = {
    "a person": record(name=text(), age=whole(0, 120)),
    "a cat": record(name=text(), color=COLOR, indoor=YES),
    "a city": record(name=text(), country=text(), capital=YES),
    "a book": record(title=text(30), pages=whole(1, 2000), genre={"enum": ["fiction", "science", "history"]}),
    "a movie": record(title=text(20), year=whole(1900, 2030), stars=whole(1, 5)),
    "a point": record(x=whole(-10, 10), y=whole(-10, 10)),
    "a line": record(start=record(x=whole(), y=whole()), end=record(x=whole(), y=whole())),
    "a color": COLOR,
    "a truth value": YES,
    "nothing": NONE,
    "a small number": whole(1, 9),
    "a negative number": whole(-99, -10),
    "a word": text(8, minLength=2),
    "three words": some(text(8), 3, 3),
    "up to four numbers": some(whole(), 4),
    "one or two colors": some(COLOR, 2, 1),
    "a matrix": some(some(whole(0, 9), 2, 2), 2, 2),
    "a date": pattern("^[0-9]{4}-[01][0-9]-[0-3][0-9]$"),
    "a phone number": pattern("^\\+[0-9]{2} [0-9]{3} [0-9]{4}$"),
    "a postal code": record(code=pattern("^[A-Z]{2}[0-9]{4}$"), valid=YES),
    "a version": record(version=pattern("^[0-9]\\.[0-9]\\.[0-9]$"), stable=YES),
    "a constant": {"const": "specserve"},
    "a fixed record": record(kind={"const": "ping"}, version={"const": 1}, ok={"const": True}),
    "a number or a word": {"anyOf": [whole(), text(6)]},
    "a cat or a dog": {"anyOf": [record(cat=text()), record(dog=text(), barks=YES)]},
    "a word or nothing": {"anyOf": [text(10), NONE]},
    "an optional nickname": record(["name"], name=text(), nickname=text()),
    "all optional": record([], a=whole(0, 9), b=YES, c=text(5)),
    "an empty record": record(),
    "a user": record(name=text(), email=pattern("^[a-z]{1,8}@[a-z]{1,8}\\.com$"), active=YES),
    "an order": record(id=whole(1, 9999), items=some(record(name=text(), count=whole(1, 9)), 2, 1), paid=YES),
    "a tree": record(value=whole(), left=record(value=whole()), right=record(value=whole())),
    "a deep record": record(a=record(b=record(c=record(d=record(e=whole()))))),
    "a weather report": record(
        city=text(), temperature=whole(-40, 50), sky={"enum": ["clear", "cloudy", "rain", "snow"]}
    ),
    "a recipe": record(name=text(20), minutes=whole(1, 240), ingredients=some(text(12), 3, 1)),
    "a question": record(question=text(40), answers=some(text(12), 4, 2), correct=whole(0, 3)),
    "a tool call": record(name={"const": "search"}, arguments=record(query=text(20), limit=whole(1, 10))),
    "one of two tools": {
        "anyOf": [
            record(tool={"const": "add"}, a=whole(), b=whole()),
            record(tool={"const": "echo"}, message=text(16)),
        ]
    },
    "a score": record(score=whole(0, 10), reason=text(40)),
    "a sentiment": record(sentiment={"enum": ["positive", "negative", "neutral"]}, confidence=whole(0, 100)),
    "flags": record(a=YES, b=YES, c=YES, d=YES, e=YES),
    "mixed enum": {"enum": [1, "one", True, None]},
    "a list of records": some(record(id=whole(0, 9), tag=COLOR), 3, 1),
    "a song": record(title=text(20), seconds=whole(30, 600), artists=some(text(12), 2, 1)),
    "an address": record(["street", "city"], street=text(20), number=whole(1, 999), city=text(12), note=text(12)),
    "a game": record(board=some(some({"enum": ["X", "O", " "]}, 3, 3), 3, 3), next={"enum": ["X", "O"]}),
    "a match": record(home=text(), away=text(), score=some(whole(0, 9), 2, 2)),
    "a log line": record(level={"enum": ["INFO", "WARN", "ERROR"]}, message=text(40), code=whole(0, 599)),
    "a config": record(
        host=pattern("^[a-z]{1,10}$"), port=whole(1, 65535), tls=YES, tags={"anyOf": [some(text(6), 2), NONE]}
    ),
    "a measurement": record(value=whole(0, 1000), unit={"enum": ["m", "kg", "s"]}, by=record(name=text(), id=whole())),
}


def faults(value: Any, schema: Schema, at: str = "$") -> Iterator[str]:
    """Why a value does not satisfy a schema; knows the keywords above and refuses others."""
    unknown = set(schema) - {*_CHECKS, "required", "additionalProperties"}
    if unknown:
        raise ValueError(f"the checker does not know {unknown}")
    if "type" in schema and not _is(value, schema["type"]):
        yield f"{at}: {value!r} is no {schema['type']}"
        return
    for keyword, want in schema.items():
        if keyword in _CHECKS and not _CHECKS[keyword](value, want, schema):
            yield f"{at}: {value!r} fails {keyword} {want!r}"
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in schema.get("properties", {}):
                yield from faults(inner, schema["properties"][name], f"{at}.{name}")
    if isinstance(value, list) and "items" in schema:
        for index, inner in enumerate(value):
            yield from faults(inner, schema["items"], f"{at}[{index}]")


def _is(value: Any, name: str) -> bool:
    types = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
    if name == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, types[name])


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right


_CHECKS: dict[str, Any] = {
    "type": lambda value, want, _: True,
    "enum": lambda value, want, _: any(_same(value, item) for item in want),
    "const": lambda value, want, _: _same(value, want),
    "anyOf": lambda value, want, _: any(not list(faults(value, item)) for item in want),
    "minimum": lambda value, want, _: value >= want,
    "maximum": lambda value, want, _: value <= want,
    "minLength": lambda value, want, _: len(value) >= want,
    "maxLength": lambda value, want, _: len(value) <= want,
    "minItems": lambda value, want, _: len(value) >= want,
    "maxItems": lambda value, want, _: len(value) <= want,
    "pattern": lambda value, want, _: re.search(want, value) is not None,
    "items": lambda value, want, _: True,
    "properties": lambda value, want, schema: (
        set(schema["required"]) <= set(value) and (schema["additionalProperties"] or set(value) <= set(want))
    ),
}
