"""Does drafting delay a first token? Time to first token with the drafter and without, alone and in company.

In process, on one engine. In company, eight other answers are running, in the same mode as the request that is timed.
Both modes get the same prompt in turns, in changing order; the median of the pairs' ratios is reported. A prompt is a
text of the dataset, repeated and cut to its length, never in the prefix cache.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from asking import chat_ids, submit_alone
from results import PROMPTS, table, write

from specserve.build import Built, build
from specserve.config import EngineConfig
from specserve.events import Delta, Failed
from specserve.prompts import read_prompts

WARM_STEPS = 6  # of the company, before the request comes


def cut_to(ids: Sequence[int], length: int) -> tuple[int, ...]:
    """A text repeated until it is so long; its first tokens, which open a chat, stay its first."""
    return tuple(itertools.islice(itertools.cycle(ids), length))


def advance_until(built: Built, waiting: set[str]) -> None:
    """Step until each of these requests has said something."""
    while waiting:
        for event in built.engine.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                waiting.discard(event.request_id)


def first_token_ms(built: Built, prompt: Sequence[int], company: Sequence[Sequence[int]], drafter: str) -> float:
    """Milliseconds from the request's arrival to its first token."""
    others = [submit_alone(built, other, drafter, 512).request_id for other in company]
    advance_until(built, set(others))
    for _ in range(WARM_STEPS if others else 0):
        built.engine.step()
    start = time.perf_counter()
    mine = submit_alone(built, prompt, drafter, 8).request_id
    advance_until(built, {mine})
    seconds = time.perf_counter() - start
    for request_id in (*others, mine):
        built.engine.abort(request_id)
    while built.engine.has_work():
        built.engine.step()
    return 1e3 * seconds


def measure_case(
    built: Built, texts: Sequence[Sequence[int]], length: int, running: int, options: argparse.Namespace
) -> list[object]:
    """[prompt tokens, running, ms off, ms on, ratio of the pairs]."""
    found: dict[str, list[float]] = {"off": [], options.drafter: []}
    rng = random.Random(options.seed)
    for pair in range(-1, options.pairs):  # the first pair warms up
        prompt = cut_to(rng.choice(texts), length)
        company = [cut_to(text, min(len(text), 256)) for text in rng.choices(texts, k=running)]
        for drafter in sorted(found, reverse=bool(pair % 2)):
            milliseconds = first_token_ms(built, prompt, company, drafter)
            if pair >= 0:
                found[drafter].append(milliseconds)
        print(f"{length} tokens, {running} running: pair {pair + 1} of {options.pairs}", file=sys.stderr)
    on, off = found[options.drafter], found["off"]
    ratio = statistics.median(one / other for one, other in zip(on, off, strict=True))
    return [length, running, statistics.median(off), statistics.median(on), ratio]


def measure(options: argparse.Namespace) -> None:
    built = build(EngineConfig.from_options(model=options.model, max_num_seqs=16, drafter=options.drafter))
    texts = [chat_ids(built, text) for _, text in read_prompts(options.dataset)]
    cases = itertools.product(options.lengths, options.running)
    columns = ["prompt tokens", "running", "off ms", "on ms", "ratio"]
    rows = [measure_case(built, texts, length, running, options) for length, running in cases]
    record = {"drafter": options.drafter, "cases": [dict(zip(columns, row, strict=True)) for row in rows]}
    title = f"Time to first token, {options.drafter} against off"
    write("ttft", record, {title: table(columns, rows)}, built.environment, seed=options.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dataset", type=Path, default=PROMPTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024], metavar="TOKENS")
    parser.add_argument("--running", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    with torch.inference_mode():
        measure(parser.parse_args())


if __name__ == "__main__":
    main()
