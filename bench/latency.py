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
from asking import chat_ids, submit_alone
from results import FORMATS, PROMPTS, known_formats, table, write

from specserve.build import Built, build
from specserve.cli.sim import counting_bar
from specserve.config import EngineConfig
from specserve.events import Delta, Failed, Finished
from specserve.prompts import read_prompts
from specserve.request import Request

AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: milliseconds to its first token and per token after it, and what it was."""

    ttft_ms: float
    tpot_ms: float
    acceptance_length: float
    token_ids: list[int]


Ask = Callable[[Sequence[int]], Answer]


# ---- ours


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
        request = submit_alone(built, prompt, drafter, num_tokens)
        return run(built, [request])[request.request_id]

    return ask


def throughput(built: Built, prompts: Sequence[Sequence[int]], drafter: str, num_tokens: int) -> float:
    """Tokens a second of several prompts together."""
    start = time.perf_counter()
    answers = run(built, [submit_alone(built, prompt, drafter, num_tokens) for prompt in prompts])
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


def theirs(folder: Path, num_tokens: int) -> dict[str, Ask]:
    """`transformers`, plain and with prompt lookup, in bf16, never stopping early."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
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
    engines = {name: build(engine_config(options, name)) for name in options.formats}
    first = next(iter(engines.values()))
    encoded = [chat_ids(first, text) for _, text in prompts]
    modes = {"on": options.drafter, "off": "off"}
    contestants = {
        f"{name} {mode}": ours(built, drafter, options.tokens)
        for name, built in engines.items()
        for mode, drafter in modes.items()
    }
    contestants |= theirs(first.folder, options.tokens)
    answers = take_turns(contestants, encoded)
    found = summary(answers)
    together = {name: at_once(built, encoded, modes, options) for name, built in engines.items()}
    record = {
        "model": options.model, "drafter": options.drafter, "max_tokens": options.tokens,
        "summary": found,
        "identical_on_off": {name: _num_identical(answers[f"{name} on"], answers[f"{name} off"]) for name in engines},
        "answers": [
            {"category": prompts[i][0], **{name: _figures(group[i]) for name, group in answers.items()}}
            for i in range(len(prompts))
        ],
        "at_once": together,
    }  # fmt: skip
    tables = {
        f"Batch 1, greedy, {options.tokens} tokens, medians": category_table([name for name, _ in prompts], answers),
        f"Tokens a second, {AT_ONCE} prompts at once": at_once_table(together, found, options.tokens),
    }
    write("latency", record, tables, "; ".join(built.environment for built in engines.values()), seed=0)


def engine_config(options: argparse.Namespace, name: str) -> EngineConfig:
    return EngineConfig.from_options(
        model=options.model,
        num_draft_tokens=options.num_draft_tokens,
        kv_cache_gib=1.0,
        **FORMATS[name],
    )


def take_turns(contestants: dict[str, Ask], encoded: Sequence[Sequence[int]]) -> dict[str, list[Answer]]:
    """Every contestant's answers, prompt by prompt; another one goes first each time."""
    answers: dict[str, list[Answer]] = {name: [] for name in contestants}
    for ask in contestants.values():  # whatever is done once is done now
        ask(encoded[0][:16])
    names = list(contestants)
    with counting_bar("answers", len(encoded) * len(names)) as progress:
        for index, prompt in enumerate(encoded):
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                answers[name].append(contestants[name](prompt))
                progress(sum(map(len, answers.values())))
    return answers


def chosen(prompts: Sequence[tuple[str, str]], per_category: int) -> list[tuple[str, str]]:
    """The first few of every category, categories in turn."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for category, text in prompts:
        groups.setdefault(category, []).append((category, text))
    turns = itertools.zip_longest(*(group[:per_category] for group in groups.values()))
    return [entry for turn in turns for entry in turn if entry is not None]


def _num_identical(some: Sequence[Answer], others: Sequence[Answer]) -> int:
    return sum(one.token_ids == other.token_ids for one, other in zip(some, others, strict=True))


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


def at_once(
    built: Built, encoded: Sequence[Sequence[int]], modes: dict[str, str], options: argparse.Namespace
) -> dict[str, float]:
    """Median tokens a second of eight prompts together, by mode; modes take turns."""
    prompts = list(itertools.islice(itertools.cycle(encoded), AT_ONCE))
    rates: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(options.repeats):
        for mode, drafter in modes.items():
            rates[mode].append(throughput(built, prompts, drafter, options.tokens))
    return {mode: statistics.median(values) for mode, values in rates.items()}


def at_once_table(rates: dict[str, dict[str, float]], found: dict[str, dict[str, float]], num_tokens: int) -> str:
    """Against one answer of transformers at a time."""
    alone = found["transformers"]
    base = 1e3 * num_tokens / (alone["ttft_ms"] + alone["tpot_ms"] * (num_tokens - 1))
    rows: list[list[object]] = [
        [f"{name} {mode}", rate, rate / base] for name, modes in rates.items() for mode, rate in modes.items()
    ]
    return table(("engine", "tok/s", "ratio"), [*rows, ["transformers, one at a time", base, 1.0]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    formats = [name for name in known_formats() if name != "fp32"]
    parser.add_argument("--formats", nargs="+", default=formats, choices=known_formats())
    parser.add_argument("--dataset", type=Path, default=PROMPTS, help="JSONL with `prompt`, or `turns` as Spec-Bench")
    parser.add_argument("--per-category", type=int, default=8, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=128, help="length of an answer")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--num-draft-tokens", type=int, help="fixed draft length; default: the controller decides")
    parser.add_argument("--repeats", type=int, default=3, help=f"runs of {AT_ONCE} at once")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
