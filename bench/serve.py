"""A server of our own under load: closed loops of 1, 4 and 16, speculation on and off, and Poisson arrivals.

It starts `specserve serve`, loads it through the generator of `specserve bench serve`, and ends it. On and off take
turns. The same prompts are asked in every run; each run has a cache salt of its own.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import PROMPTS, table, write

from specserve.cli.demo import server
from specserve.loadgen.drive import drive
from specserve.loadgen.report import parse_goodput, summarize
from specserve.loadgen.targets import GrpcTarget, ServerFacts
from specserve.loadgen.workload import Job, dataset_jobs, poisson
from specserve.prompts import read_prompts

SHOWN = ("completed", "failed", "output_throughput", "request_goodput", "median_ttft_ms", "p99_ttft_ms",
         "median_tpot_ms", "p99_tpot_ms", "spec_decode_acceptance_length")  # fmt: skip


async def run(
    address: str, jobs: Sequence[Job], drafter: str | None, slos: dict[str, float], concurrency: int | None,
    rate: float | None,
) -> tuple[dict[str, Any], ServerFacts]:  # fmt: skip
    """One run on a fresh channel, and what the server says of itself."""
    target = GrpcTarget(address, 0.0, 0, False, drafter)
    try:
        facts = await target.facts()
        found = await drive(target, jobs, max_concurrency=concurrency, max_duration=120.0)
    finally:
        await target.close()
    return summarize(found, slos, concurrency, rate), facts


def measure(options: argparse.Namespace) -> None:
    prompts = [prompt for _, prompt in read_prompts(options.dataset)]
    slos = parse_goodput(options.goodput)
    loads = [(f"{n} at once", n, None) for n in options.concurrency]
    loads += [(f"{rate:g} requests/s", None, rate) for rate in options.rates]
    found, facts = [], ServerFacts(model=options.model)
    with server(options.model) as address:
        for name, concurrency, rate in loads:
            # twice as many as run at once, so that the loop is closed
            count = options.num_prompts if rate is not None else max(options.num_prompts, 2 * (concurrency or 1))
            jobs = dataset_jobs(prompts, count, options.tokens)
            jobs = jobs if rate is None else poisson(jobs, rate, seed=0)
            for speculation, drafter in (("on", None), ("off", "off")):
                figures, facts = asyncio.run(run(address, jobs, drafter, slos, concurrency, rate))
                found.append({"load": name, "speculation": speculation, **figures})
    columns = ("load", "speculation", *SHOWN)
    rows = [[row.get(column) for column in columns] for row in found]
    record = {"model": facts.model, "goodput": slos, "runs": found}
    write("serve", record, {"A server under load": table(columns, rows)}, facts.environment, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dataset", type=Path, default=PROMPTS)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="length of an answer at most")
    parser.add_argument("--concurrency", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--rates", nargs="*", type=float, default=[2.0], metavar="REQUESTS_PER_S")
    parser.add_argument("--goodput", nargs="+", default=["ttft:500", "tpot:50"], metavar="NAME:MS")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
