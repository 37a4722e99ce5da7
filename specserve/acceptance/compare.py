"""Two results held against each other over the prompts that both asked, with a seeded bootstrap over those prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specserve.acceptance.figures import interval
from specserve.acceptance.report import Table
from specserve.errors import ConfigError

NEEDED = frozenset(("sides", "answers", "acceptance_length"))
ALL = "overall"


class Pair(NamedTuple):
    """One prompt in both results."""

    first: Mapping[str, Any]
    second: Mapping[str, Any]


Statistic = Callable[[Sequence[Pair]], float | None]


def read_result(path: Path) -> dict[str, Any]:
    """What `--json` wrote.

    Raises:
        ConfigError: the file cannot be read, or is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"result {path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not found.keys() >= NEEDED:
        raise ConfigError(f"{path} is no result of `specserve acceptance --json`")
    return found


def compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Differences by side and category, `second` − `first`, of acceptance length and of milliseconds a token.

    A side is compared with the side of its name; if no name is in both and each result has one drafter, those two.

    Raises:
        ConfigError: no drafter or no prompt can be compared.
    """
    rows = []
    for label, other in _labels(first, second):
        pairs = _pairs(first, second, label, other)
        groups = {ALL: pairs}
        for pair in pairs:
            groups.setdefault(pair.first["category"], []).append(pair)
        told = label if label == other else f"{label} → {other}"
        rows += [_row(name, told, group) for name, group in groups.items()]
    return rows


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The differences as a table."""
    columns = (
        "category", "drafter", "prompts", "length A", "length B", "B − A", "from", "to", "ms A", "ms B", "B − A",
        "from", "to",
    )  # fmt: skip
    shown = [
        [
            row["category"],
            row["drafter"],
            row["num_prompts"],
            *_cells(row["acceptance_length"]),
            *_cells(row["ms_per_token"]),
        ]
        for row in rows
    ]
    note = "acceptance length and milliseconds a token; from … to: 90 % interval of the difference over prompts"
    return Table("B against A, over the prompts that both asked", columns, shown, note)


def _labels(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str]]:
    ours, theirs = ([label for label in result["sides"] if label != "off"] for result in (first, second))
    shared = [(label, label) for label in ours if label in theirs]
    if shared:
        return shared
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]
    raise ConfigError(f"no drafter is in both results: {', '.join(ours)} in A; {', '.join(theirs)} in B")


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any], label: str, other: str) -> list[Pair]:
    theirs = {answer["prompt"]: answer for answer in second["answers"] if answer["side"] == other}
    ours = [answer for answer in first["answers"] if answer["side"] == label]
    pairs = [Pair(answer, theirs[answer["prompt"]]) for answer in ours if answer["prompt"] in theirs]
    if not pairs:
        raise ConfigError("the two results have no prompt in common")
    return pairs


def _row(category: str, told: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    return {
        "category": category,
        "drafter": told,
        "num_prompts": len(pairs),
        "acceptance_length": _difference(pairs, "num_committed_tokens", "num_steps"),
        "ms_per_token": _difference(pairs, "decode_ms", "num_decoded"),
    }


def _difference(pairs: Sequence[Pair], above: str, below: str) -> dict[str, Any]:
    """Of two pooled ratios."""

    def ratio(answers: Sequence[Mapping[str, Any]]) -> float | None:
        total = sum(answer[below] for answer in answers)
        return sum(answer[above] for answer in answers) / total if total else None

    def difference(sample: Sequence[Pair]) -> float | None:
        ours, theirs = ratio([pair.first for pair in sample]), ratio([pair.second for pair in sample])
        return None if ours is None or theirs is None else theirs - ours

    return {
        "first": ratio([pair.first for pair in pairs]),
        "second": ratio([pair.second for pair in pairs]),
        "difference": difference(pairs),
        "interval": interval(pairs, difference),
    }


def _cells(found: Mapping[str, Any]) -> list[object]:
    low, high = found["interval"] or (None, None)
    return [found["first"], found["second"], found["difference"], low, high]
