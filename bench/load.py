"""Does speculation ever cost? A closed loop of 1 to 64 streams in process, without drafts and with, step by step.

At every level three engines answer the same list of requests: one with speculation off, one with the drafter, and one
with a drafter that is never right. Their steps take turns: whichever has answered least of its list goes next, so that
a slow moment of the machine hits all alike, and each engine's clock stands still while others work. The list is as long
as `--seconds` need without speculation; answers end at half to one and a half times `--tokens`, so that they do not all
end in one step. The ratio of throughputs (drafter / off) of each run is taken, and of these the median with its 90 %
bootstrap interval. Each run has cache salts of its own. `--plot FILE` measures nothing: it draws the last results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
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
    """An engine, its clock, and the drafter that requests ask for."""

    built: Built
    clock: StepClock
    drafter: str

    @classmethod
    def of(cls, config: EngineConfig, drafter: str) -> Stand:
        clock = StepClock()
        with clock.running():
            return cls(build(config, clock=clock), clock, drafter)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the list: a prompt, and how many tokens its answer has."""

    prompt: Sequence[int]
    num_tokens: int


class Loop:
    """One engine's closed loop over a list of requests."""

    def __init__(self, stand: Stand, work: Sequence[Asked], streams: int) -> None:
        self.tokens = 0
        self._engine, self._drafter = stand.built.engine, stand.drafter
        self._clock, self._from = stand.clock, stand.clock()
        self._salt = fresh_salt()
        self._waiting = list(reversed(work))
        self._total = sum(asked.num_tokens for asked in work)
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
                asked, now = self._waiting.pop(), self._clock()
                request = greedy_request(asked.prompt, self._drafter, asked.num_tokens, salt=self._salt, now=now)
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


def measure_level(
    stands: dict[str, Stand], prompts: Sequence[Sequence[int]], streams: int, options: Any
) -> list[dict[str, Outcome]]:
    """All runs of one level, by contestant."""
    rng = random.Random(options.seed)
    lengths = [rng.randint(options.tokens // 2, options.tokens * 3 // 2) for _ in prompts]
    asked = list(map(Asked, prompts, lengths))
    first = [asked[i % len(asked)] for i in range(2 * streams)]
    (probe,) = run([Loop(stands["off"], first, streams)])
    count = max(2 * streams, round(2 * streams * options.seconds / probe.seconds))
    work = [asked[i % len(asked)] for i in range(count)]
    runs = []
    for number in range(options.runs):
        found = dict(zip(stands, run([Loop(stand, work, streams) for stand in stands.values()]), strict=True))
        runs.append(found)
        told = ", ".join(f"{name} {outcome.throughput:.0f}" for name, outcome in found.items())
        print(f"{streams} streams, {count} requests, run {number + 1} of {options.runs}: tokens/s {told}", flush=True)
    return runs


def compared(streams: int, runs: list[dict[str, Outcome]], name: str) -> dict[str, Any]:
    """A contestant beside plain decoding, at one level."""
    ratios = [found[name].throughput / found["off"].throughput for found in runs]
    low, high = interval(ratios, random.Random(0))
    on = [found[name] for found in runs]
    return {
        "streams": streams,
        "off tokens/s": statistics.median(found["off"].throughput for found in runs),
        "on tokens/s": statistics.median(outcome.throughput for outcome in on),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "drafted a step": sum(outcome.drafted for outcome in on) / sum(outcome.steps for outcome in on),
        "acceptance length": 1 + sum(outcome.accepted for outcome in on) / sum(outcome.steps for outcome in on),
        "ttft ratio": statistics.median(found[name].mean_ttft_ms / found["off"].mean_ttft_ms for found in runs),
        "runs": [{who: asdict(found[who]) for who in ("off", name)} for found in runs],
    }


def measure(options: argparse.Namespace) -> None:
    config = EngineConfig.from_options(
        model=options.model, max_num_seqs=max(options.levels), drafter=options.drafter, kv_cache_gib=2.5
    )
    stands = {name: Stand.of(config, name) for name in ("off", options.drafter)}
    stands["wrong"] = wrong = Stand.of(config, options.drafter)
    wrong.built.engine.drafting.drafters[options.drafter] = WrongDrafter(options.wrong_id)
    built = wrong.built
    texts = [prompt for _, prompt in read_prompts(options.dataset)]
    random.Random(options.seed).shuffle(texts)
    prompts = [cut(chat_ids(built, text), MAX_PROMPT_TOKENS) for text in texts]
    levels = {level: measure_level(stands, prompts, level, options) for level in options.levels}
    titles = {options.drafter: "load", "wrong": "load_wrong"}
    for name, file in titles.items():
        rows = [compared(level, runs, name) for level, runs in levels.items()]
        columns = [column for column in rows[0] if column != "runs"]
        tables = {f"Closed loop, {name} against off": table(columns, [[row[c] for c in columns] for row in rows])}
        record = {"dataset": options.dataset.name, "drafter": name, "levels": rows}
        write(file, record, tables, built.environment, seed=options.seed)


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
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="of one run without speculation, about")
    parser.add_argument("--tokens", type=int, default=128, help="length of an answer, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wrong-id", type=int, default=4, help="the id that the wrong drafter drafts")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the last results as SVG, and measure nothing")
    options = parser.parse_args()
    if options.plot is not None:
        return plot(options.plot)
    with torch.inference_mode():
        measure(options)


if __name__ == "__main__":
    main()
