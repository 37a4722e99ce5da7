"""What every drafter brings on one dataset, per category: acceptance lengths, with and without answers that loop.

Answers of at most `--tokens` tokens, one request after another in a seeded order, each case with a salt of its own, so
that what its drafter keeps grows with its own answers only. Acceptance is tokens over steps, all answers pooled. Counts
do not depend on the machine's pace; `specserve acceptance` is where speeds are compared. In "head always" the
head is asked in every step of `auto`, whether it pays on this machine or not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from results import PROMPTS, table, write
from specserve_drafts.grow import Shape

from specserve.acceptance.measure import measure
from specserve.acceptance.questions import Settings, chosen
from specserve.acceptance.records import Answer, Side
from specserve.build import Built, build
from specserve.cli.sim import counting_bar
from specserve.config import EngineConfig
from specserve.prompts import read_prompts

EARLY_EXIT_LAYERS = 0.8  # of the target's
EARLY_EXIT_SHARE = 0.25  # of the prompts: its draft forwards take nearly as long as steps


@dataclass(frozen=True, slots=True)
class Case:
    """A drafter with so many nodes a step; `chain`: the head drafts a chain; `always`: `auto` asks the head always."""

    label: str
    drafter: str
    nodes: int
    cold: bool = False
    chain: bool = False
    always: bool = False


CASES = (
    Case("ngram, 5", "ngram", 5),
    Case("suffix, 15", "suffix", 15),
    Case("suffix, 15, cold", "suffix", 15, cold=True),
    Case("recycling, 15", "recycling", 15),
    Case("recycling, 15, cold", "recycling", 15, cold=True),
    Case("early exit, 5", "early_exit", 5),
    Case("eagle, chain of 5", "eagle", 5, chain=True),
    Case("eagle, tree of 15", "eagle", 15),
    Case("auto, 15", "auto", 15),
    Case("auto, 15, cold", "auto", 15, cold=True),
    Case("auto, 31", "auto", 31),
    Case("auto, 15, head always", "auto", 15, always=True),
    Case("auto, 31, head always", "auto", 31, always=True),
)


@contextmanager
def prepared(built: Built, case: Case) -> Iterator[None]:
    """The engine's drafters as the case wants them, for a while."""
    drafters: Any = built.engine.drafting.drafters
    undo: list[Callable[[], None]] = []

    def put(thing: Any, name: str, value: Any) -> None:
        before = getattr(thing, name)
        undo.append(lambda: setattr(thing, name, before))
        setattr(thing, name, value)

    if case.chain:
        put(drafters["eagle"]._trees, "shape", Shape(width=1, branch=1))
    if case.always:
        for payback in drafters["auto"].paybacks.values():
            put(payback, "asks", lambda: True)
        put(drafters["eagle"]._trees, "shape", Shape())  # its time is not counted here
    try:
        yield
    finally:
        for step in reversed(undo):
            step()


def ask(built: Built, prompts: Sequence[tuple[str, str]], case: Case, options: argparse.Namespace) -> list[Answer]:
    if case.drafter == "early_exit":
        prompts = prompts[: max(1, round(EARLY_EXIT_SHARE * len(prompts)))]
    settings = Settings(
        max_tokens=options.tokens, num_draft_tokens=case.nodes, seed=options.seed, temperature=options.temperature
    )
    side = Side(drafter=case.drafter, cold=case.cold)
    with prepared(built, case), counting_bar(case.label, len(prompts)) as progress:
        return measure(built, prompts, [side], settings, progress, plainly=False, salt=case.label)


def length(answers: Sequence[Answer]) -> float | None:
    """Tokens committed a step, all answers pooled."""
    steps = sum(answer.stats.num_steps for answer in answers)
    return sum(answer.stats.num_committed_tokens for answer in answers) / steps if steps else None


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    straight = [answer for answer in answers if not answer.loops]
    steps = sum(answer.stats.num_steps for answer in answers)
    return {
        "answers": len(answers),
        "looping": len(answers) - len(straight),
        "acceptance_length": length(answers),
        "without_loops": length(straight),
        "nodes_per_step": sum(answer.stats.num_draft_tokens for answer in answers) / max(steps, 1),
        "by_category": {
            name: {"length": length(group), "without_loops": length([one for one in group if not one.loops])}
            for name in sorted({answer.category for answer in answers})
            for group in [[answer for answer in answers if answer.category == name]]
        },
    }


def tables(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    categories = sorted({name for case in found.values() for name in case["by_category"]})

    def row(label: str, case: dict[str, Any], key: str, overall: str) -> list[object]:
        return [label, case[overall], *(case["by_category"].get(name, {}).get(key) for name in categories)]

    every = [
        [*row(label, case, "length", "acceptance_length"), case["nodes_per_step"]] for label, case in found.items()
    ]
    straight = [[*row(label, case, "without_loops", "without_loops"), case["looping"]] for label, case in found.items()]
    return {
        "Acceptance length": table(("case", "all", *categories, "nodes a step"), every),
        "Without answers that loop": table(("case", "all", *categories, "answers that loop"), straight),
    }


def run(options: argparse.Namespace) -> None:
    wanted = [case for case in CASES if not options.cases or case.label in options.cases]
    layers = None
    if any(case.drafter == "early_exit" for case in wanted):
        layers = round(EARLY_EXIT_LAYERS * options.layers)
    built = build(EngineConfig.from_options(model=options.model, drafter="auto", early_exit_layers=layers))
    wanted = [case for case in wanted if case.drafter in built.engine.drafting.drafters]
    prompts = chosen(read_prompts(options.dataset), options.limit, options.seed)
    found = {}
    for case in wanted:
        found[case.label] = figures(ask(built, prompts, case, options))
        print(f"{case.label}: {found[case.label]['acceptance_length']:.3f}", file=sys.stderr)
        record = {
            "dataset": options.dataset.name, "prompts": len(prompts), "max_tokens": options.tokens,
            "temperature": options.temperature, "cases": found,
        }  # fmt: skip
        # after each case: all of them take an hour
        write(options.name, record, tables(found), built.environment, seed=options.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--layers", type=int, default=30, help="of the model, of which early exit takes four fifths")
    parser.add_argument("--dataset", type=Path, default=PROMPTS)
    parser.add_argument("--limit", type=int, help="prompts, categories in turns")
    parser.add_argument("--tokens", type=int, default=128, help="length of an answer, at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--cases", nargs="+", choices=[case.label for case in CASES], metavar="CASE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="acceptance", help="of the file in results/")
    with torch.inference_mode():
        run(parser.parse_args())


if __name__ == "__main__":
    main()
