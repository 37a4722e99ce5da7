"""The engine against the oracle: transformers without a cache and an independent sampler, in fp32.

Every sampling parameter, greedy and sampled, without drafts and with each kind of drafter, all requests in one
engine at once. Ids may differ only where the oracle's margin is below 1e-3, in at most 1 % of sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cells import OracleAnswers, compare_logprobs
from drafters import AdversarialDrafter, OracleDrafter, RandomTreeDrafter
from harness import EngineHarness, Run
from oracle import NearTies, gumbel

from specserve.events import FinishReason
from specserve.request import Request, SamplingParams

PROMPTS = (
    (17, 201, 45, 45, 9, 130),
    (88, 12, 240, 7, 88, 12, 240, 7, 88, 12, 240, 7, 88, 12, 240, 7, 88),
    tuple(range(100, 133)),
)
STOP_IDS = tuple(range(40, 110))

TRUNCATIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 40, "top_p": 0.95},
    {"top_p": 0.5},
    {"top_p": 0.9, "min_p": 0.05},
    {"min_p": 0.3},
    {"top_k": 8, "top_p": 0.8, "min_p": 0.02},
]
ENDINGS: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"stop_token_ids": STOP_IDS},
    {"stop_token_ids": STOP_IDS, "min_tokens": 9},
    {"stop_token_ids": STOP_IDS, "min_tokens": 20},
    {"temperature": 3.0, "ignore_eos": False, "max_tokens": 50},
    {"temperature": 3.0, "ignore_eos": False, "max_tokens": 50, "min_tokens": 30},
    {"temperature": 3.0, "ignore_eos": True, "max_tokens": 50},
]
OTHERS: list[dict[str, Any]] = [
    {"n": 3},
    {"n": 4, "top_p": 0.9, "stop_token_ids": STOP_IDS},
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": 20, "logprobs_mode": "processed", "top_k": 6},
    {"logprobs": 3, "logprobs_mode": "processed", "top_p": 0.7, "min_tokens": 4, "stop_token_ids": STOP_IDS},
]
PROCESSORS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.8, "max_tokens": 8},
    {"presence_penalty": 2.0},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -0.6, "presence_penalty": 1.0, "repetition_penalty": 1.1},
    {"logit_bias": {5: 9.0, 201: -100.0, 45: 6.5}},
    {"allowed_token_ids": tuple(range(3, 250, 7))},
    {"allowed_token_ids": (40, 41, 200), "stop_token_ids": (41,), "min_tokens": 15},
    {"frequency_penalty": 1.0, "n": 3},
    {"repetition_penalty": 1.3, "logprobs": 20, "logprobs_mode": "processed", "top_k": 9},
    {"frequency_penalty": 2.0, "n": 3, "logprobs": 4, "logprobs_mode": "processed"},
    {"logprobs": 0, "logprob_token_ids": (0, 299, 45)},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 20, "logprobs": 2, "presence_penalty": 0.5},
]
TEMPERATURES = (0.0, 0.3, 0.8, 1.4)
SEEDS = (0, 1234, 2**64 - 1)


def parameter_sets() -> list[dict[str, Any]]:
    """Every truncation at every temperature; every ending and extra at one greedy and one sampled."""
    sets = [{"temperature": t, **extra} for t, extra in itertools.product(TEMPERATURES, TRUNCATIONS)]
    sets += [{"temperature": t, **extra} for t, extra in itertools.product((0.0, 0.8), ENDINGS + OTHERS + PROCESSORS)]
    defaults = {"max_tokens": 20, "ignore_eos": True}
    return [defaults | extra for extra in sets]


def numbered(params: list[SamplingParams]) -> list[Request]:
    """Prompts and seeds take turns."""
    return [
        Request(request_id=f"r{i}", prompt_token_ids=PROMPTS[i % len(PROMPTS)], params=item)
        for i, item in enumerate(params)
    ]


class Answers(OracleAnswers):
    """The oracle's answers to all the cases; some of these are made from answers to others."""

    def requests(self) -> list[Request]:
        """The parameter sets, then some of them again with stop strings taken from their own answers."""
        sets = [SamplingParams(**(extra | {"seed": SEEDS[i % len(SEEDS)]})) for i, extra in enumerate(parameter_sets())]
        plain = numbered(sets)
        stops = []
        for request in plain[:24]:
            for stop in self._stops(request):
                stops.append(replace(request.params, stop=stop, include_stop_str_in_output=len(stops) % 2 == 0))
                stops.append(replace(request.params, stop=stop, min_tokens=12))
        again = [replace(r, request_id=f"s{i}") for i, r in enumerate(numbered(stops))]
        # a stop string fits the answer of the prompt that it was taken from
        prompts = [r.prompt_token_ids for r in plain[:24] for _ in range(2 * len(self._stops(r)))]
        return plain + [replace(r, prompt_token_ids=p) for r, p in zip(again, prompts, strict=True)]

    def _stops(self, request: Request) -> list[tuple[str, ...]]:
        """At most one set: two characters from the middle of the answer's text, and a string that never comes."""
        text = self.of(request, 0).text or ""
        middle = [text[i : i + 2] for i in range(len(text) // 3, len(text) - 1) if "\ufffd" not in text[i : i + 2]]
        return [("never in there", middle[0])] if middle else []

    def full(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        return {
            f"{r.request_id}/{choice}": [*r.prompt_token_ids, *self.of(r, choice).token_ids]
            for r in requests
            for choice in range(r.params.n)
        }


@pytest.fixture(scope="module")
def answers(sharp_llama: Path) -> Answers:
    return Answers(sharp_llama)


def compare(run: Run, requests: Sequence[Request], answers: Answers) -> None:
    """Ids, and where they are equal also reason, text and logprobs."""
    ties = NearTies()
    for request in requests:
        for choice in range(request.params.n):
            key = f"{request.request_id}/{choice}"
            expected = answers.of(request, choice)
            if not ties.compare(run.answers[key], expected, f"{key} {request.params}"):
                continue
            assert run.finished[key].reason == expected.finish_reason, f"{key} {request.params}"
            assert run.texts[key] == expected.text, f"{key} {request.params}"
            compare_logprobs(run, request, choice, expected)
    ties.finish()


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("oracle", "adversarial")]


@pytest.mark.parametrize("drafter_name", ["off", "ngram", "random_tree", *SLOW])
def test_every_parameter_equals_the_oracle(drafter_name: str, sharp_llama: Path, answers: Answers) -> None:
    requests = answers.requests()
    truth, vocab = answers.full(requests), answers.tokenizer.vocab_size
    drafters: dict[str, Any] = {
        "oracle": OracleDrafter(truth),
        "random_tree": RandomTreeDrafter(2, vocab, truth),
        "adversarial": AdversarialDrafter(truth, vocab, lambda *key: gumbel(*key, vocab)),
    }
    harness = EngineHarness(sharp_llama, drafters.get(drafter_name, drafter_name), dtype="float32")
    run = harness.run(requests)
    compare(run, requests, answers)
    accepted = sum(end.speculation.num_accepted_tokens for end in run.finished.values())
    assert (accepted > 0) == (drafter_name != "off")


def test_the_cases_reach_what_they_are_for(answers: Answers) -> None:
    """Counted on the oracle's answers: every way to end occurs, and min_tokens holds some of them back."""
    requests = answers.requests()
    outputs = {r.request_id: answers.of(r, 0) for r in requests}
    by_eos = by_id = by_text = held = 0
    for r in requests:
        params, output = r.params, outputs[r.request_id]
        ended = output.finish_reason == FinishReason.STOP
        by_eos += ended and not params.stop_token_ids and not params.stop
        by_id += ended and bool(params.stop_token_ids)
        by_text += ended and bool(params.stop)
        held += ended and params.min_tokens > 0
    assert min(by_eos, by_id, by_text, held) >= 2, (by_eos, by_id, by_text, held)
    assert sum(o.finish_reason == FinishReason.LENGTH for o in outputs.values()) >= 20
    assert min(min(o.margins) for o in outputs.values()) > 0
