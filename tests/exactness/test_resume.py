"""An answer that was cut can be continued: prompt + answer so far with the same seed gives exactly the rest.

The draw index of a token is the length of its prefix, and a recomputed row has the bits of the first one
(docs/exactness.md names the conditions). The same seed on different prompts draws with the same noise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specserve import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(tiny_llama: Callable[..., Path]) -> LLM:
    return LLM(str(tiny_llama(layers=2)), num_pages=64, max_num_seqs=4, max_num_batched_tokens=64, dtype="float32")


@pytest.mark.parametrize("cut", [1, 7, 16, 17, 31])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 1.3, "seed": 6, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.2, "logit_bias": {5: 2.0}},
    ],
    ids=["greedy", "sampled", "truncated", "penalised"],
)
def test_prompt_and_answer_so_far_continue_exactly(llm: LLM, params: dict[str, object], cut: int) -> None:
    prompt = list(range(40, 60))
    whole = SamplingParams(max_tokens=32, ignore_eos=True, **params)  # type: ignore[arg-type]
    answer = list(llm.generate([prompt], whole)[0].outputs[0].token_ids)
    rest = SamplingParams(max_tokens=32 - cut, ignore_eos=True, **params)  # type: ignore[arg-type]
    continued = llm.generate([prompt + answer[:cut]], rest)[0].outputs[0].token_ids
    assert answer[:cut] + list(continued) == answer


def test_another_seed_goes_elsewhere(llm: LLM) -> None:
    def answer(seed: int) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=seed)
        return llm.generate([list(range(40, 60))], params)[0].outputs[0].token_ids

    assert answer(5) == answer(5) != answer(6)


def test_one_seed_gives_correlated_answers_to_different_prompts(llm: LLM) -> None:
    """At a very high temperature the noise alone decides, and it depends on the position, not on the prompt."""
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=100.0, seed=9)
    first, second = llm.generate([[41] * 10, [77] * 10], params)
    same = sum(a == b for a, b in zip(first.outputs[0].token_ids, second.outputs[0].token_ids, strict=True))
    assert same >= 14
