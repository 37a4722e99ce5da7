"""Every feature that makes the device wait is counted in each step that it is used in, and in no other."""

from __future__ import annotations

from typing import Any

import pytest
from cells import prompt
from harness import EngineHarness
from tiny import TinyLlama

from specserve.request import Request, SamplingParams
from specserve.waits import Wait

NUM_TOKENS = 6


def run(folder: Any, drafter: str = "off", **params: Any) -> tuple[dict[str, int], int]:
    """Steps with each wait, and all steps; the prompt is one step."""
    harness = EngineHarness(folder, drafter)
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 1}
    item = Request(request_id="r", prompt_token_ids=prompt(1, 30), params=SamplingParams(**given | params))
    harness.run([item])
    return harness.engine.metrics.waits, harness.engine.metrics.num_forwards


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.9, "top_p": 0.5}, {Wait.SAMPLED: NUM_TOKENS}),
        ({"frequency_penalty": 0.5}, {Wait.PENALTIES: NUM_TOKENS}),
        ({"logit_bias": {5: 1.0}, "logprobs": 2}, {Wait.PENALTIES: NUM_TOKENS, Wait.LOGPROBS: NUM_TOKENS}),
        ({"min_tokens": 4, "ignore_eos": False}, {Wait.MIN_TOKENS: 4}),
        ({"stop": ("never said",)}, {Wait.STOP_STRINGS: NUM_TOKENS}),
        ({"prompt_logprobs": 0}, {Wait.PROMPT_LOGPROBS: 1}),
    ],
    ids=["plain", "sampled", "penalties", "bias and logprobs", "min tokens", "stop", "prompt"],
)
def test_each_is_counted(tiny_llama: TinyLlama, params: dict[str, Any], expected: dict[str, int]) -> None:
    waits, steps = run(tiny_llama(), **params)
    assert waits == expected and steps == NUM_TOKENS


def test_a_drafter_that_learns_reads_every_row(tiny_llama: TinyLlama) -> None:
    waits, steps = run(tiny_llama(), "recycling")
    assert set(waits) <= {Wait.HOST_DRAFTER, Wait.TOP_IDS} and 0 < waits[Wait.TOP_IDS] < steps


def test_drafts_are_made_on_the_host(tiny_llama: TinyLlama) -> None:
    waits, steps = run(tiny_llama(), "ngram")
    assert set(waits) == {Wait.HOST_DRAFTER} and 0 < waits[Wait.HOST_DRAFTER] < steps
