"""Does speculation ever cost? A closed loop of 1 to 64 streams in process, with drafts and without, step by step.

At every level two engines answer the same list of requests, one with speculation off and one with the drafter. Their
steps take turns: whichever has answered less of its list goes next, so that a slow moment of the machine hits both
alike, and each engine's clock stands still while the other works. The list is as long as `--seconds` need without
speculation. The ratio of throughputs (drafter / off) of each pair is taken, and of these the median with its 90 %
bootstrap interval. Each pair has cache salts of its own. `--wrong` puts a drafter that is never right in the drafter's
seat. `--plot FILE` measures nothing: it draws what the last runs of both kinds wrote.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from asking import chat_ids, fresh_salt, greedy_request
from results import FOLDER, PROMPTS, table, write

from specserve.acceptance.questions import cut
from specserve.build import Built, build
from specserve.config import EngineConfig
from specserve.events import Delta, Failed, Finished
from specserve.prompts import read_prompts
from specserve.proposal import DraftRow, DraftTree, StepResult

MAX_PROMPT_TOKENS = 1024


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


class StepClock:
    """An engine's time: it stands still while the engine has no turn."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: float | None = None

    def __call__(self) -> float:
        return self._seconds + (0.0 if self._began is None else time.perf_counter() - self._began)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._began = time.perf_counter()
        yield
        self._seconds, self._began = self(), None


@dataclass(frozen=True, slots=True)
class Stand:
    """An engine and its clock."""

    built: Built
    clock: StepClock

    @classmethod
    def of(cls, config: EngineConfig) -> Stand:
        clock = StepClock()
        with clock.running():
            return cls(build(config, clock=clock), clock)


class Loop:
    """One engine's closed loop over a list of prompts."""

    def __init__(
        self, stand: Stand, prompts: Sequence[Sequence[int]], streams: int, drafter: str, num_tokens: int
    ) -> None:
        self.tokens = 0
        self._engine, self._drafter, self._num_tokens = stand.built.engine, drafter, num_tokens
        self._clock, self._from = stand.clock, stand.clock()
        self._salt = fresh_salt()
        self._waiting = list(reversed(prompts))
        self._total = len(prompts) * num_tokens
        self._free = streams
        self._ttft: list[float] = []
        before = self._engine.metrics.speculation
        self._before = (before.num_draft_tokens, before.num_accepted_tokens, before.num_steps)

    @property
    def share(self) -> float:
        """How much of the list is answered."""
        return self.tokens / self._total

    def step(self) -> None:
        with self._clock.running():
            for _ in range(min(self._free, len(self._waiting))):
                self._free -= 1
                prompt, now = self._waiting.pop(), self._clock()
                request = greedy_request(prompt, self._drafter, self._num_tokens, salt=self._salt, now=now)
                self._engine.submit(request)
            events = self._engine.step()
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                self.tokens += len(event.tokens)
            if isinstance(event, Finished):
                self._free += 1
                self._ttft.append(event.timing.ttft_ms or 0.0)

    def outcome(self) -> Outcome:
        after = self._engine.metrics.speculation
        drafted, accepted, steps = self._before
        return Outcome(
            self._clock() - self._from,
            self.tokens,
            after.num_draft_tokens - drafted,
            after.num_accepted_tokens - accepted,
            after.num_steps - steps,
            statistics.mean(self._ttft),
        )


def run(loops: Sequence[Loop]) -> list[Outcome]:
    """All of them to their ends, a step at a time."""
    while min(loop.share for loop in loops) < 1:
        min(loops, key=lambda loop: loop.share).step()
    return [loop.outcome() for loop in loops]


def interval(ratios: Sequence[float], rng: random.Random, share: float = 0.9) -> tuple[float, float]:
    """Bootstrap interval of the median."""
    found = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    edge = (1 - share) / 2
    return found[int(edge * len(found))], found[min(int((1 - edge) * len(found)), len(found) - 1)]


def measure_level(engines: dict[str, Stand], prompts: Sequence[Sequence[int]], streams: int, options: Any) -> Any:
    """All pairs of one level, and what they say."""
    tokens = options.tokens
    first = [prompts[i % len(prompts)] for i in range(2 * streams)]
    (probe,) = run([Loop(engines["off"], first, streams, "off", tokens)])
    count = max(2 * streams, round(2 * streams * options.seconds / probe.seconds))
    work = [prompts[i % len(prompts)] for i in range(count)]
    pairs: list[dict[str, Outcome]] = []
    for pair in range(options.pairs):
        loops = [Loop(stand, work, streams, name, tokens) for name, stand in engines.items()]
        found = dict(zip(engines, run(loops), strict=True))
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
    config = EngineConfig.from_options(
        model=options.model, max_num_seqs=max(options.levels), drafter=options.drafter, kv_cache_gib=2.5
    )
    engines = {"off": Stand.of(config), options.drafter: Stand.of(config)}
    built = engines[options.drafter].built
    if options.wrong:
        built.engine.drafting.drafters[options.drafter] = WrongDrafter(options.wrong_id)
    texts = [prompt for _, prompt in read_prompts(options.dataset)]
    random.Random(options.seed).shuffle(texts)
    prompts = [cut(chat_ids(built, text), MAX_PROMPT_TOKENS) for text in texts]
    rows = [measure_level(engines, prompts, level, options) for level in options.levels]
    columns = [name for name in rows[0] if name != "pairs"]
    title = f"Closed loop, {'a drafter that is never right' if options.wrong else options.drafter} against off"
    tables = {title: table(columns, [[row[name] for name in columns] for row in rows])}
    record = {"dataset": options.dataset.name, "drafter": options.drafter, "wrong": options.wrong, "levels": rows}
    write("load_wrong" if options.wrong else "load", record, tables, built.environment, seed=options.seed)


# ---- the plot

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 300, 50, 20, 40
SERIES = {"load": ("auto, real prompts", "#1f6feb"), "load_wrong": ("a drafter that is never right", "#cf222e")}


def plot(path: Path) -> None:
    """Median ratio and its interval by number of streams, as SVG."""
    runs = {name: json.loads((FOLDER / f"{name}.json").read_text())["levels"] for name in SERIES if _exists(name)}
    levels = [row for rows in runs.values() for row in rows]
    low, high = min(0.9, *(row["low"] for row in levels)), max(1.1, *(row["high"] for row in levels))
    steps = math.log2(max(row["streams"] for row in levels)) or 1.0

    def x(streams: float) -> float:
        return LEFT + 20 + math.log2(streams) / steps * (WIDTH - LEFT - 40)

    def y(ratio: float) -> float:
        return TOP + (high - ratio) / (high - low) * (HEIGHT - TOP - BOTTOM)

    shapes = [
        _line(LEFT, y(1.0), WIDTH, y(1.0), "#888"),
        _text(2, y(1.0) + 4, "1.0"),
        _text(2, y(high) + 10, f"{high:.1f}"),
    ]
    shapes += [
        _text(x(streams) - 6, HEIGHT - 20, str(streams)) for streams in sorted({row["streams"] for row in levels})
    ]
    shapes.append(
        _text(LEFT, HEIGHT - 4, "streams; tokens a second with drafts over without, median and 90 % interval")
    )
    for number, (name, rows) in enumerate(runs.items()):
        label, color = SERIES[name]
        shapes.append(_text(WIDTH - 220, TOP + 16 * number + 4, label, color))
        shapes += [_line(x(row["streams"]), y(row["low"]), x(row["streams"]), y(row["high"]), color) for row in rows]
        shapes += [
            _line(x(a["streams"]), y(a["ratio"]), x(b["streams"]), y(b["ratio"]), color)
            for a, b in itertools.pairwise(rows)
        ]
    body = "".join(shapes)
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">{body}</svg>\n')


def _exists(name: str) -> bool:
    return (FOLDER / f"{name}.json").is_file()


def _line(x0: float, y0: float, x1: float, y1: float, color: str) -> str:
    return f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="{color}" stroke-width="2"/>'


def _text(x: float, y: float, words: str, color: str = "#555") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" font-family="sans-serif" fill="{color}">{words}</text>'


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
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the last results as SVG, and measure nothing")
    options = parser.parse_args()
    if options.plot is not None:
        return plot(options.plot)
    with torch.inference_mode():
        measure(options)


if __name__ == "__main__":
    main()
