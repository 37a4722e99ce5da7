"""Coupled or block verification at a temperature: acceptance lengths of one head, the same prompts and node budget.

Block verification wants a sampled chain. Coupled verification shares the target's own noise with the drafter, keeps the
promise that speculation changes no token, and may also verify a tree of siblings. All four are run through the engine,
several answers at once; acceptance is tokens over steps, all answers pooled.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from asking import chat_ids
from results import PROMPTS, table, write
from specserve_drafts.grow import Shape

from specserve.acceptance.questions import chosen, cut
from specserve.build import Built, build
from specserve.cli.sim import counting_bar
from specserve.config import EngineConfig
from specserve.events import Failed, Finished
from specserve.prompts import read_prompts
from specserve.request import Request, SamplingParams

MAX_PROMPT_TOKENS = 1024


def shapes(nodes: int) -> dict[str, tuple[str, Shape]]:
    """(rule, shape) by name; all draft at most so many nodes."""
    return {
        "block, chain": ("block", Shape(width=1, branch=1, depth=nodes)),
        "coupled, chain": ("coupled", Shape(width=1, branch=1, depth=nodes)),
        "coupled, 2 siblings": ("coupled", Shape(branch=2, depth=nodes)),
        "coupled, 4 siblings": ("coupled", Shape(branch=4, depth=nodes)),
    }


def acceptance(built: Built, shape: Shape, temperature: float, options: argparse.Namespace, label: str) -> float:
    """Tokens a step over all prompts, each answered `--answers` times."""
    engine: Any = built.engine
    engine.drafting.drafters["eagle"]._trees.shape = shape
    prompts = chosen(read_prompts(options.dataset), options.limit, options.seed)
    before = engine.metrics.speculation
    steps, committed = before.num_steps, before.num_committed_tokens
    for number, (_, text) in enumerate(prompts):
        ids = cut(chat_ids(built, text), MAX_PROMPT_TOKENS)
        params = SamplingParams(temperature=temperature, seed=number, n=options.answers, max_tokens=options.tokens)
        engine.submit(Request(request_id=f"{label} {number}", prompt_token_ids=ids, params=params))
    done = 0
    with counting_bar(label, len(prompts) * options.answers) as progress:
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, Failed):
                    raise event.error
                done += isinstance(event, Finished)
            progress(done)
    after = engine.metrics.speculation
    return float((after.num_committed_tokens - committed) / (after.num_steps - steps))


def measure(options: argparse.Namespace) -> None:
    found: dict[str, dict[str, float]] = {}
    for rule in ("block", "coupled"):
        built = build(
            EngineConfig.from_options(
                model=options.model, drafter="eagle", num_draft_tokens=options.nodes, verification=rule, max_num_seqs=16
            )
        )
        for name, (wanted, shape) in shapes(options.nodes).items():
            if wanted == rule:
                found[name] = {
                    f"T = {t}": acceptance(built, shape, t, options, f"{name}, T = {t}") for t in options.temperatures
                }
    block = found["block, chain"]
    columns = ["", *block, *(f"{column}, against block" for column in block)]
    rows = [[name, *row.values(), *(row[column] / block[column] for column in block)] for name, row in found.items()]
    title = f"Acceptance length with {options.nodes} nodes a step"
    record = {"dataset": options.dataset.name, "nodes": options.nodes, "prompts": options.limit, "lengths": found}
    write("verification", record, {title: table(columns, rows)}, built.environment, seed=options.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="a model with a head")
    parser.add_argument("--dataset", type=Path, default=PROMPTS)
    parser.add_argument("--limit", type=int, default=48, help="prompts, categories in turns")
    parser.add_argument("--answers", type=int, default=2, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=96, help="length of an answer, at most")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0], metavar="T")
    parser.add_argument("--seed", type=int, default=0)
    with torch.inference_mode():
        measure(parser.parse_args())


if __name__ == "__main__":
    main()
