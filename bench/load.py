"""Does speculation ever cost? A closed loop of 1 to 64 streams in process, with drafts and without, pair by pair.

At every level the same list of requests is answered by the same engine with speculation off and with the drafter, in
turns, so that a slow moment of the machine hits both. The list is as long as `--seconds` need without speculation. The
ratio of throughputs (drafter ÷ off) of each pair is taken, and of these the median with its 90 % bootstrap interval.
Each run has a cache salt of its own. `--wrong` puts a drafter that is never right in the drafter's seat.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from results import PROMPTS, table, write

from specserve.build import Built, build
from specserve.config import EngineConfig
from specserve.events import Failed, Finished
from specserve.prompts import read_prompts
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.request import Request, SamplingParams, SpeculationParams

MAX_PROMPT_TOKENS = 1024
_numbers = itertools.count()


class WrongDrafter:
    """Always the same id, one that the model never says."""

    name = "wrong"
    wants_top_ids = False

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def start(self, view: DraftRow) -> None: ...

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.chain([self._token_id] * cap, self.name) for cap in caps]

    def observe(self, view: DraftRow, result: StepResult) -> None: ...

    def stop(self, view: DraftRow) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of the list."""

    seconds: float
    tokens: int
    drafted: int
    accepted: int
    steps: int
    mean_ttft_ms: float

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds


def cut_prompt(ids: Sequence[int]) -> tuple[int, ...]:
    """At most `MAX_PROMPT_TOKENS`: three quarters from the head, one from the tail."""
    if len(ids) <= MAX_PROMPT_TOKENS:
        return tuple(ids)
    tail = MAX_PROMPT_TOKENS // 4
    return (*ids[: MAX_PROMPT_TOKENS - tail], *ids[-tail:])


def run(built: Built, prompts: Sequence[Sequence[int]], streams: int, drafter: str, num_tokens: int) -> Outcome:
    """Answer every prompt, `streams` at a time."""
    engine, salt = built.engine, f"load {next(_numbers)}"
    waiting = list(reversed(prompts))
    before = engine.metrics.speculation
    drafted, accepted, steps = before.num_draft_tokens, before.num_accepted_tokens, before.num_steps
    flying = tokens = 0
    ttft = []
    start = time.perf_counter()
    while waiting or flying:
        while waiting and flying < streams:
            engine.submit(
                Request(
                    request_id=f"load-{next(_numbers)}",
                    prompt_token_ids=tuple(waiting.pop()),
                    params=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
                    speculation=SpeculationParams(drafter=drafter),
                    cache_salt=salt,
                )
            )
            flying += 1
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                flying -= 1
                tokens += event.usage.completion_tokens
                ttft.append(event.timing.ttft_ms or 0.0)
    seconds = time.perf_counter() - start
    after = engine.metrics.speculation
    return Outcome(
        seconds,
        tokens,
        after.num_draft_tokens - drafted,
        after.num_accepted_tokens - accepted,
        after.num_steps - steps,
        statistics.mean(ttft),
    )


def interval(ratios: Sequence[float], rng: random.Random, share: float = 0.9) -> tuple[float, float]:
    """Bootstrap interval of the median."""
    found = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    edge = (1 - share) / 2
    return found[int(edge * len(found))], found[min(int((1 - edge) * len(found)), len(found) - 1)]


def measure_level(built: Built, prompts: Sequence[Sequence[int]], streams: int, options: argparse.Namespace) -> Any:
    """All pairs of one level, and what they say."""
    tokens = options.tokens
    probe = run(built, [prompts[i % len(prompts)] for i in range(2 * streams)], streams, "off", tokens)
    count = max(2 * streams, round(2 * streams * options.seconds / probe.seconds))
    work = [prompts[i % len(prompts)] for i in range(count)]
    pairs: list[dict[str, Outcome]] = []
    for pair in range(options.pairs):
        order = ["off", options.drafter]
        found = {name: run(built, work, streams, name, tokens) for name in (order if pair % 2 else order[::-1])}
        pairs.append(found)
        plain, drafting = found["off"].throughput, found[options.drafter].throughput
        print(
            f"{streams} streams, pair {pair + 1} of {options.pairs}: off {plain:.0f} tokens/s,"
            f" {options.drafter} {drafting:.0f} ({drafting / plain:.3f})",
            file=sys.stderr,
        )
    ratios = [found[options.drafter].throughput / found["off"].throughput for found in pairs]
    low, high = interval(ratios, random.Random(0))
    on = [found[options.drafter] for found in pairs]
    return {
        "streams": streams,
        "requests": count,
        "off tokens/s": statistics.median(found["off"].throughput for found in pairs),
        "on tokens/s": statistics.median(outcome.throughput for outcome in on),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "drafted a step": sum(outcome.drafted for outcome in on) / sum(outcome.steps for outcome in on),
        "acceptance length": 1 + sum(outcome.accepted for outcome in on) / sum(outcome.steps for outcome in on),
        "ttft ratio": statistics.median(
            found[options.drafter].mean_ttft_ms / found["off"].mean_ttft_ms for found in pairs
        ),
        "pairs": [{name: asdict(outcome) for name, outcome in found.items()} for found in pairs],
    }


def measure(options: argparse.Namespace) -> None:
    streams = max(options.levels)
    built = build(EngineConfig.from_options(model=options.model, max_num_seqs=streams, drafter=options.drafter))
    if options.wrong:
        built.engine.drafting.drafters[options.drafter] = WrongDrafter(options.wrong_id)
    tokenizer = built.tokenizer
    texts = [prompt for _, prompt in read_prompts(options.dataset)]
    random.Random(options.seed).shuffle(texts)
    prompts = [cut_prompt(tokenizer.encode_chat([{"role": "user", "content": text}])) for text in texts]
    rows = [measure_level(built, prompts, level, options) for level in options.levels]
    columns = [name for name in rows[0] if name != "pairs"]
    title = f"Closed loop, {'a drafter that is never right' if options.wrong else options.drafter} against off"
    tables = {title: table(columns, [[row[name] for name in columns] for row in rows])}
    record = {"dataset": options.dataset.name, "drafter": options.drafter, "wrong": options.wrong, "levels": rows}
    write("load_wrong" if options.wrong else "load", record, tables, built.environment, seed=options.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dataset", type=Path, default=PROMPTS)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="STREAMS")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="of one run without speculation, about")
    parser.add_argument("--tokens", type=int, default=128, help="length of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wrong", action="store_true", help="a drafter that is never right")
    parser.add_argument("--wrong-id", type=int, default=4, help="the id that it drafts")
    with torch.inference_mode():
        measure(parser.parse_args())


if __name__ == "__main__":
    main()
