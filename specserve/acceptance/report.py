"""One result as a plain object (what `--json` writes), and the tables that terminal and page show of it.

Tables are made from the object, so that a result that was read back shows the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from specserve.acceptance.figures import figures_of
from specserve.acceptance.fixed import Curve, StepTimes
from specserve.acceptance.records import PLAIN, Answer, Side
from specserve.acceptance.verdict import verdict
from specserve.tables import table

MAX_POSITIONS = 64
SHOWN_POSITIONS = 8


Groups = Sequence[tuple[str, str, Mapping[str, Any]]]
"""(drafter, category, figures), overall first."""


class Table(NamedTuple):
    """A titled table; `note` says how to read it."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[object]]
    note: str = ""


def result_of(
    answers: Sequence[Answer], temperature: float, num_draft_tokens: int | None, curve: Curve | None = None
) -> dict[str, Any]:
    """All figures: overall, by category, without loops, plainly and for every side. The top level is the first side's.

    Args:
        answers: every prompt plainly, and by each side.
        curve: the engine's cost model, rows → seconds; None = estimates are made with the step times of this run.
    """
    plain = {answer.prompt: answer for answer in answers if answer.side == PLAIN}
    sides = list(dict.fromkeys(answer.side for answer in answers if answer.side != PLAIN))
    times = StepTimes((step for answer in answers for step in answer.steps), curve)
    found = {side.label: _side(side, answers, plain, times, temperature, num_draft_tokens) for side in (PLAIN, *sides)}
    first = found[sides[0].label]["overall"] if sides else found[PLAIN.label]["overall"]
    return {
        "acceptance_length": first["acceptance_length"],
        "acceptance_rate": first["acceptance_rate"],
        "drafter": sides[0].label if sides else PLAIN.label,
        "num_different": sum(side["overall"]["num_different"] for side in found.values()),
        "step_times": "medians of this run" if curve is None else "the engine's cost model",
        "sides": found,
        "answers": [_answer(answer, plain[answer.prompt]) for answer in answers],
    }


def _side(
    side: Side,
    answers: Sequence[Answer],
    plain: Mapping[str, Answer],
    times: StepTimes,
    temperature: float,
    num_draft_tokens: int | None,
) -> dict[str, Any]:
    def told(own: Sequence[Answer]) -> dict[str, Any]:
        straight = [answer for answer in own if not answer.loops]
        found = figures_of(own, plain, times)
        without_loops = figures_of(straight, plain, times) if straight and len(straight) < len(own) else None
        return {
            **asdict(found),
            "without_loops": None if without_loops is None else asdict(without_loops),
            "verdict": verdict(found, side.drafter, temperature, num_draft_tokens, without_loops),
        }

    own = [answer for answer in answers if answer.side == side]
    categories = sorted({answer.category for answer in own})
    return {
        "overall": told(own),
        "categories": {name: told([answer for answer in own if answer.category == name]) for name in categories},
    }


def _answer(answer: Answer, plain: Answer) -> dict[str, Any]:
    """What `--compare` needs of one answer, and enough to find it again."""
    return {
        "prompt": answer.prompt,
        "category": answer.category,
        "side": answer.side.label,
        "num_tokens": len(answer.token_ids),
        "reason": answer.reason.value,
        "num_steps": answer.stats.num_steps,
        "num_committed_tokens": answer.stats.num_committed_tokens,
        "num_draft_tokens": answer.stats.num_draft_tokens,
        "num_accepted_tokens": answer.stats.num_accepted_tokens,
        "decode_ms": 1e3 * answer.decode_seconds,
        "num_decoded": answer.num_decoded,
        "loops": answer.loops,
        "different": answer.token_ids != plain.token_ids,
    }


def text(result: Mapping[str, Any]) -> str:
    """What the terminal shows: the tables without detail, then the verdicts."""
    parts = [
        f"{shown.title}\n\n{table(shown.columns, shown.rows)}" + (f"\n\n{shown.note}" if shown.note else "")
        for shown in tables(result, detail=False)
    ]
    for label, side in _drafting(result).items():
        parts.append("\n".join([f"{label}:", *(f"  * {sentence}" for sentence in side["overall"]["verdict"])]))
    return "\n\n".join([*parts, *_unknown(result)])


def _unknown(result: Mapping[str, Any]) -> list[str]:
    """What a server does not show."""
    what = result.get("unknown", ())
    return ["\n".join(["From outside one cannot tell:", *(f"  * {each}" for each in what)])] if what else []


def tables(result: Mapping[str, Any], detail: bool) -> list[Table]:
    """Every table that has rows; `detail`: by category what is otherwise shown overall only."""
    sides: dict[str, Any] = result["sides"]
    drafting = _drafting(result)
    groups = _groups(drafting, detail)
    found = [
        _counts(sides),
        _speeds(sides, result["step_times"]),
        _categories(sides),
        _time(_groups(sides, detail)),
        _positions("Accepted/drafted at each position", groups, MAX_POSITIONS if detail else SHOWN_POSITIONS),
        _histogram("Steps by the tokens they committed", groups),
        _fixed("Estimates for fixed draft lengths: tokens a second", groups, result["step_times"]),
        _loops(_groups(drafting, detail)),
        _guessers(groups),
        *([_inactive(drafting)] if detail else []),
    ]
    return [shown for shown in found if shown.rows]


def _drafting(result: Mapping[str, Any]) -> dict[str, Any]:
    """The sides that may draft."""
    return {label: side for label, side in result["sides"].items() if label != PLAIN.label}


def _groups(sides: Mapping[str, Any], detail: bool) -> Groups:
    found = []
    for label, side in sides.items():
        found.append((label, "overall", side["overall"]))
        found += [(label, name, figures) for name, figures in side["categories"].items()] if detail else []
    return found


def _counts(sides: Mapping[str, Any]) -> Table:
    names = (
        "num_prompts",
        "num_steps",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_committed_tokens",
    )
    rows = [
        [
            label,
            f["acceptance_length"],
            _percent(f["acceptance_rate"]),
            *(f[name] for name in names),
            f["num_different"],
        ]
        for label, f in ((label, side["overall"]) for label, side in sides.items())
    ]
    columns = (
        "drafter", "acceptance length", "rate", "prompts", "steps", "drafts", "drafted", "accepted", "committed",
        "other ids",
    )  # fmt: skip
    return Table("Acceptance", columns, rows)


def _speeds(sides: Mapping[str, Any], step_times: str) -> Table:
    rows: list[list[object]] = []
    for label, side in sides.items():
        f = side["overall"]
        low, high = f["speedup_interval"] or (None, None)
        predicted = (f["predicted_speedup"], f["alpha"], f["gamma"], f["predicted_length"])
        rows.append([label, f["ms_per_token"], f["speedup"], low, high, *predicted, f["best_fixed"]])
    columns = (
        "drafter", "ms per token", "speedup", "from", "to", "predicted", "α", "γ", "length by formula", "best fixed K",
    )  # fmt: skip
    note = (
        "speedup: against off in the same run, from … to its 90 % interval over prompts; predicted by step times"
        f" ({step_times}); formula: (1 − α^(γ+1)) / (1 − α)"
    )
    return Table("Speed", columns, rows, note)


def _categories(sides: Mapping[str, Any]) -> Table:
    rows: list[list[object]] = []
    for name in dict.fromkeys(name for side in sides.values() for name in side["categories"]):
        for label, side in sides.items():
            f = side["categories"].get(name)
            if f is not None:
                counts = (f["num_draft_tokens"], f["num_accepted_tokens"], f["num_committed_tokens"])
                speed = (f["ms_per_token"], f["speedup"], f["predicted_speedup"], f["best_fixed"])
                length, formula, rate = f["acceptance_length"], f["predicted_length"], _percent(f["acceptance_rate"])
                rows.append([name, label, f["num_prompts"], length, formula, rate, *counts, *speed])
    columns = (
        "category", "drafter", "prompts", "acceptance length", "by formula", "rate", "drafted", "accepted", "committed",
        "ms per token", "speedup", "predicted", "best fixed K",
    )  # fmt: skip
    return Table("By category", columns, rows)


def _time(groups: Groups) -> Table:
    rows: list[list[object]] = []
    for label, category, f in groups:
        if f["time"] is not None:
            rows.append(
                [label, category, *(f["time"][name] for name in ("step_ms", "draft_ms", "verify_ms", "rest_ms"))]
            )
    return Table("Milliseconds of a step", ("drafter", "of", "step", "draft", "verify", "rest"), rows)


def _positions(title: str, groups: Groups, most: int) -> Table:
    longest = min(max((len(f["positions"]) for _, _, f in groups), default=0), most)
    rows: list[list[object]] = []
    for label, category, f in groups:
        shown = [f"{p['accepted']}/{p['drafted']} {100 * p['rate']:.0f} %" for p in f["positions"][:longest]]
        if shown:
            rows.append([label, category, *shown, *[None] * (longest - len(shown))])
    return Table(title, ("drafter", "of", *(str(i) for i in range(1, longest + 1))), rows)


def _histogram(title: str, groups: Groups) -> Table:
    longest = max((len(f["steps_by_tokens"]) for _, _, f in groups), default=0)
    rows: list[list[object]] = [
        [label, category, *f["steps_by_tokens"], *[0] * (longest - len(f["steps_by_tokens"]))]
        for label, category, f in groups
    ]
    return Table(title, ("drafter", "of", *(str(i) for i in range(1, longest + 1))), rows)


def _fixed(title: str, groups: Groups, step_times: str) -> Table:
    shown = [(label, category, f["fixed"]) for label, category, f in groups if f["fixed"]]
    counts = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16)
    rows: list[list[object]] = [
        [label, category, *(round(fixed[count]["tokens_per_second"], 1) for count in counts)]
        for label, category, fixed in shown
    ]
    note = f"draft tokens a step across; replayed from the trees of this run; step times: {step_times}"
    return Table(title, ("drafter", "of", *map(str, counts)), rows, note)


def _loops(groups: Groups) -> Table:
    rows: list[list[object]] = []
    for label, category, every in groups:
        straight = every["without_loops"]
        if straight is not None:
            pair = [f[name] for name in ("acceptance_length", "speedup") for f in (every, straight)]
            rows.append([label, category, every["num_looping"], *pair])
    columns = ("drafter", "of", "looping", "length", "length without", "speedup", "speedup without")
    return Table("With and without outputs that loop", columns, rows)


def _guessers(groups: Groups) -> Table:
    rows: list[list[object]] = [
        [label, category, name, count, _percent(count / sum(f["accepted_by_drafter"].values()))]
        for label, category, f in groups
        for name, count in sorted(f["accepted_by_drafter"].items())
    ]
    return Table("Whose guesses were accepted", ("drafter", "of", "guessed by", "accepted", "share"), rows)


def _inactive(sides: Mapping[str, Any]) -> Table:
    rows = [
        [label, reason, count]
        for label, side in sides.items()
        for reason, count in sorted(side["overall"]["inactive"].items())
    ]
    return Table("Why answers had no drafts, or lost some", ("drafter", "reason", "answers"), rows)


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f} %"


def counters_text(found: Mapping[str, Any]) -> str:
    """What a server's counters tell, and what they do not."""
    counts = (
        "num_forwards",
        "num_steps",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_committed_tokens",
    )
    rows: list[list[object]] = [
        ["acceptance length", found["acceptance_length"]],
        ["acceptance rate", _percent(found["acceptance_rate"])],
        *([name.removeprefix("num_").replace("_", " "), found[name]] for name in counts),
        ["tokens a second", found["tokens_per_second"]],
        *([f"ms of a forward: {name.removesuffix('_ms')}", ms] for name, ms in (found["time"] or {}).items()),
        ["α", found["alpha"]],
        ["γ", found["gamma"]],
        ["acceptance length by formula", found["predicted_length"]],
    ]
    group = [("all", "everybody", dict(found))]
    shown = [
        Table(f"{found['server']} in {found['seconds']:.0f} seconds", ("what", "figure"), rows),
        _positions("Accepted/drafted at each position", group, SHOWN_POSITIONS),
        _histogram("Steps by the tokens they committed", group),
    ]
    parts = [f"{each.title}\n\n{table(each.columns, each.rows)}" for each in shown if each.rows]
    return "\n\n".join([*parts, *_unknown(found)])
