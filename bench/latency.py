"""What one user waits for, per kind of prompt: our engine with speculation on and off, and transformers.

Batch 1, greedy, answers of a fixed length, the same prompts through the same chat template. The four contestants take
turns prompt by prompt, in an order that rotates, so that a slow moment of the machine hits all alike; medians are
compared. Then eight prompts at once on our engine. Our prompts never meet in the prefix cache.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from results import PROMPTS, table, write

from specserve.build import Built, build
from specserve.cli.sim import counting_bar
from specserve.config import EngineConfig
from specserve.events import Delta, Failed, Finished
from specserve.loadgen.workload import read_prompts
from specserve.request import Request, SamplingParams, SpeculationParams

AT_ONCE = 8
_salts = itertools.count()


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: milliseconds to its first token and per token after it, and what it was."""

    ttft_ms: float
    tpot_ms: float
    acceptance_length: float
    token_ids: list[int]


Ask = Callable[[Sequence[int]], Answer]


# ---- ours


def submit(built: Built, prompt: Sequence[int], drafter: str, num_tokens: int) -> Request:
    request = Request(
        request_id=f"latency-{next(_salts)}",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
        speculation=SpeculationParams(drafter=drafter),
        cache_salt=f"latency {next(_salts)}",
        arrival_time=built.engine.clock(),
    )
    built.engine.submit(request)
    return request


def run(built: Built, requests: Sequence[Request]) -> dict[str, Answer]:
    """Answers of requests in flight together, by id."""
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    found = {}
    while built.engine.has_work():
        for event in built.engine.step():
            match event:
                case Delta():
                    ids[event.request_id] += [token.token_id for token in event.tokens]
                case Finished():
                    timing, length = event.timing, event.speculation.acceptance_length
                    mine = ids[event.request_id]
                    found[event.request_id] = Answer(timing.ttft_ms or 0.0, timing.tpot_ms or 0.0, length, mine)
                case Failed():
                    raise event.error
    return found


def ours(built: Built, drafter: str, num_tokens: int) -> Ask:
    def ask(prompt: Sequence[int]) -> Answer:
        request = submit(built, prompt, drafter, num_tokens)
        return run(built, [request])[request.request_id]

    return ask


def at_once(built: Built, prompts: Sequence[Sequence[int]], drafter: str, num_tokens: int) -> float:
    """Tokens a second of several prompts together."""
    start = time.perf_counter()
    answers = run(built, [submit(built, prompt, drafter, num_tokens) for prompt in prompts])
    return sum(len(answer.token_ids) for answer in answers.values()) / (time.perf_counter() - start)


# ---- transformers


class _Clock:
    """A streamer that only looks at the clock; `generate` gives it the prompt first, then what each step added."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def theirs(folder: Path, num_tokens: int, dtype: torch.dtype) -> dict[str, Ask]:
    """`transformers`, plain and with prompt lookup, in our weights' type, never stopping early."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    # what the model's folder says of sampling and of ends does not apply
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)

    def asker(**options: Any) -> Ask:
        def ask(prompt: Sequence[int]) -> Answer:
            clock, start = _Clock(), time.perf_counter()
            ids = torch.tensor([list(prompt)])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
            end = time.perf_counter()
            new = out[0, len(prompt) :].tolist()
            first = clock.times[1] if len(clock.times) > 1 else end
            num_steps = max(len(clock.times) - 1, 1)
            tpot = 1e3 * (end - first) / max(len(new) - 1, 1)
            return Answer(1e3 * (first - start), tpot, len(new) / num_steps, new)

        return ask

    return {"transformers": asker(), "transformers lookup": asker(prompt_lookup_num_tokens=10)}


# ---- the whole


def measure(options: argparse.Namespace) -> None:
    prompts = chosen(read_prompts(options.dataset), options.per_category)
    config = EngineConfig.from_options(
        model=options.model, dtype=options.dtype, num_draft_tokens=options.num_draft_tokens
    )
    built = build(config)
    encoded = [built.tokenizer.encode_chat([{"role": "user", "content": text}]) for _, text in prompts]
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype]
    contestants = {
        name: ours(built, drafter, options.tokens) for name, drafter in (("on", options.drafter), ("off", "off"))
    }
    contestants |= theirs(built.folder, options.tokens, dtype)
    answers: dict[str, list[Answer]] = {name: [] for name in contestants}
    for ask in contestants.values():  # whatever is done once is done now
        ask(encoded[0][:16])
    with counting_bar("answers", len(prompts) * len(contestants)) as progress:
        for index, prompt in enumerate(encoded):
            names = list(contestants)
            for name in names[index % len(names) :] + names[: index % len(names)]:
                answers[name].append(contestants[name](prompt))
                progress(sum(map(len, answers.values())))
    record = {
        "model": options.model, "dtype": options.dtype, "drafter": options.drafter, "max_tokens": options.tokens,
        "summary": summary(answers),
        "identical_on_off": sum(a.token_ids == b.token_ids for a, b in zip(answers["on"], answers["off"], strict=True)),
        "answers": [
            {"category": prompts[i][0], **{name: _figures(found[i]) for name, found in answers.items()}}
            for i in range(len(prompts))
        ],
    }  # fmt: skip
    record["at_once"] = together(built, encoded, options, record["summary"])
    tables = {
        f"Batch 1, greedy, {options.tokens} tokens, medians": category_table([name for name, _ in prompts], answers),
        f"{AT_ONCE} at once": table(list(record["at_once"]), [list(record["at_once"].values())]),
    }
    write(options.name, record, tables, built.environment, seed=0)


def chosen(prompts: Sequence[tuple[str, str]], per_category: int) -> list[tuple[str, str]]:
    """The first few of every category, categories in turn."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for category, text in prompts:
        groups.setdefault(category, []).append((category, text))
    turns = itertools.zip_longest(*(group[:per_category] for group in groups.values()))
    return [entry for turn in turns for entry in turn if entry is not None]


def _figures(answer: Answer) -> dict[str, float]:
    return {name: value for name, value in asdict(answer).items() if name != "token_ids"}


def summary(answers: dict[str, list[Answer]]) -> dict[str, dict[str, float]]:
    """Medians over all prompts, and time per token as a share of transformers'."""
    found = {name: _medians(group) for name, group in answers.items()}
    base = found["transformers"]["tpot_ms"]
    return {name: {**figures, "ratio": figures["tpot_ms"] / base if base else 0.0} for name, figures in found.items()}


def _medians(group: Sequence[Answer]) -> dict[str, float]:
    names = ("ttft_ms", "tpot_ms", "acceptance_length")
    return {name: statistics.median(getattr(answer, name) for answer in group) for name in names}


def category_table(categories: Sequence[str], answers: dict[str, list[Answer]]) -> str:
    """One line a category and contestant; the ratio is time per token over transformers'."""
    rows = []
    for category in (*dict.fromkeys(categories), "all"):
        mine = [i for i, name in enumerate(categories) if category in (name, "all")]
        picked = {name: [group[i] for i in mine] for name, group in answers.items()}
        for name, figures in summary(picked).items():
            rows.append([category, name, *figures.values()])
    return table(("category", "engine", "ms to first token", "ms per token", "acceptance length", "ratio"), rows)


def together(
    built: Built, encoded: Sequence[Sequence[int]], options: argparse.Namespace, found: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Tokens a second of eight at once, against one transformers answer at a time."""
    rates: dict[str, list[float]] = {"on": [], "off": []}
    for _ in range(options.repeats):
        for name, drafter in (("on", options.drafter), ("off", "off")):
            prompts = list(itertools.islice(itertools.cycle(encoded), AT_ONCE))
            rates[name].append(at_once(built, prompts, drafter, options.tokens))
    alone = found["transformers"]
    total_ms = alone["ttft_ms"] + alone["tpot_ms"] * (options.tokens - 1)
    base = 1e3 * options.tokens / total_ms
    on, off = (statistics.median(rates[name]) for name in ("on", "off"))
    return {
        "on_tok_s": on, "off_tok_s": off, "transformers_tok_s": base, "on_ratio": on / base, "off_ratio": off / base,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--dataset", type=Path, default=PROMPTS, help="JSONL with `prompt`, or `turns` as Spec-Bench")
    parser.add_argument("--per-category", type=int, default=8, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=128, help="length of an answer")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help=f"runs of {AT_ONCE} at once")
    parser.add_argument("--name", default="latency", help="of the file in results/")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
