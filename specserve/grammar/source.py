"""How a grammar and a vocabulary become llguidance's objects: the same way in the trial and in the engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specserve.constraint import GrammarSpec
from specserve.errors import FieldViolation, GrammarInvalid

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_MESSAGE_LEN = 500
# Shared by all answers that follow one compiled grammar, then renewed. 0.1 kB (a bounded string) to 2 kB each; a
# string of at most n characters has n states.
MAX_LEXER_STATES = 50_000
# Below llguidance's million: eager work on large lexemes stops earlier (`((a{1000}){1000}){1000}`: 0.2 s, not 5).
INITIAL_LEXER_FUEL = 300_000
# What one row may explore before its request fails. An ambiguous grammar compares the items of a row with each other:
# `e: e e | e e e | "a"` takes 14 ms for a row of 700, seconds for llguidance's own 2,000. Fifty ordinary schemas need
# less than 100, and 4 for each of an object's optional properties.
MAX_ITEMS_IN_ROW = 600
STEP_MAX_ITEMS = 2_500
STEP_LEXER_FUEL = 60_000  # 4 ms
# As json.dumps writes: free whitespace lets a small model pad an object for ever, and a fixed text is forced text.
JSON_FORMAT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The model's ids: a tokenizer.json as text, the number of logits, and every id that ends an answer."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def load(self) -> LLTokenizer:
        """Takes about a second.

        Raises:
            ValueError: llguidance cannot read this tokenizer.
        """
        from llguidance import LLTokenizer

        return LLTokenizer(self.tokenizer_json, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids) or None)


def source_of(spec: GrammarSpec) -> str:
    """The grammar as llguidance reads it; nothing is checked here."""
    from llguidance import LLMatcher

    if isinstance(spec.value, tuple):
        # one terminal: as many rules, a thousand choices would be a thousand items in a row
        return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(map(_lark_text, spec.value)))
    match spec.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(spec.value, defaults=JSON_FORMAT)  # type: ignore[arg-type]
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=JSON_FORMAT)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(spec.value)
        case "lark":
            return LLMatcher.grammar_from_lark(spec.value)
    raise ValueError(f"no such kind of grammar: {spec.kind!r}")


def special_texts(tokenizer_json: str) -> tuple[str, ...]:
    """Texts that the tokenizer spells as one special token, so that no answer can contain them as text."""
    vocabulary = json.loads(tokenizer_json)
    added = vocabulary.get("added_tokens") if isinstance(vocabulary, dict) else None
    return tuple(token["content"] for token in added or () if token.get("special") and token.get("content"))


def special_choice(spec: GrammarSpec, special: tuple[str, ...]) -> str | None:
    """Why a list of choices cannot be answered: one holds a special token's text."""
    if not isinstance(spec.value, tuple):
        return None
    for text in spec.value:
        found = next((token for token in special if token in text), None)
        if found is not None:
            return f"choice {text!r} contains the special token {found!r}, which an answer cannot have as text"
    return None


def _lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def new_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        verbose_errors=False,
        max_lexer_states=MAX_LEXER_STATES,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        max_items_in_row=MAX_ITEMS_IN_ROW,
        step_max_items=STEP_MAX_ITEMS,
        step_lexer_fuel=STEP_LEXER_FUEL,
    )
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def why(matcher: LLMatcher) -> str:
    text = matcher.get_error().replace("<non-verbose/>", "").strip()
    return text if len(text) <= MAX_MESSAGE_LEN else text[:MAX_MESSAGE_LEN] + " …"


def invalid(description: str) -> GrammarInvalid:
    return GrammarInvalid([FieldViolation("grammar", description)])
