"""The engine in process: batches, streams side by side, many prompts, and failures that stay with their prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specserve import LLM, GrammarSpec, SamplingParams, SpeculationConfig
from specserve.errors import ConfigError, InvalidRequest
from specserve.events import Delta, Finished

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama: Callable[..., Path]) -> LLM:
    return LLM(str(tiny_llama()), speculation="ngram", num_pages=64, max_num_seqs=4, max_num_queued_requests=5)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[40 + i, 50, 60] for i in range(3)]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    assert [o.prompt_token_ids for o in together] == [tuple(prompt) for prompt in prompts]


def test_more_prompts_than_the_line_holds(llm: LLM) -> None:
    outputs = llm.generate([[40 + i % 20, 50] for i in range(40)], GREEDY)
    assert all(len(output.outputs[0].token_ids) == 6 for output in outputs)


def test_streams_and_batches_side_by_side(llm: LLM) -> None:
    expected = [llm.generate([[40 + i, 50]], GREEDY)[0].outputs[0].token_ids for i in range(3)]
    first, second = llm.stream([40, 50], GREEDY), llm.stream([41, 50], GREEDY)
    seen: tuple[list[int], list[int]] = ([], [])
    open_streams = {0: first, 1: second}
    third = None
    while open_streams:
        for which, stream in list(open_streams.items()):
            event = next(stream, None)
            if event is None:
                del open_streams[which]
            elif isinstance(event, Delta):
                seen[which].extend(token.token_id for token in event.tokens)
            if third is None:
                third = llm.generate([[42, 50]], GREEDY)[0].outputs[0].token_ids
    assert (tuple(seen[0]), tuple(seen[1]), third) == tuple(expected)


def test_closing_a_stream_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream([40, 50, 60], GREEDY)
    next(stream)
    stream.close()
    assert llm.built.engine.pool.num_referenced == 0


def test_one_failure_leaves_the_other_answers(llm: LLM) -> None:
    # nothing but an id that may not be drawn is left to the first
    stuck = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=4, stop_token_ids=(7,), allowed_token_ids=(7,))
    bad, good = llm.generate([[40, 50], [41, 50]], [stuck, GREEDY])
    assert len(good.outputs[0].token_ids) == 6
    with pytest.raises(type(bad.error), match="exclude every token"):
        bad.outputs  # noqa: B018


def test_refusals(llm: LLM, tiny_llama: Callable[..., Path]) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        llm.generate([[40]], SamplingParams(max_tokens=0))
    with pytest.raises(InvalidRequest, match="one per prompt"):
        llm.generate([[40], [41]], [GREEDY])
    with pytest.raises(InvalidRequest, match="grammar"):
        llm.generate([[40]], SamplingParams(grammar=GrammarSpec("yaml", "x")))
    with pytest.raises(ConfigError, match="Did you mean 'page_size'"):
        LLM(str(tiny_llama()), page_sise=4)
    with pytest.raises(ConfigError, match="holds"):
        LLM(str(tiny_llama()), kv_cache_gib=1e-6)


def test_speculation_is_a_name_or_a_record(tiny_llama: Callable[..., Path]) -> None:
    llm = LLM(str(tiny_llama()), speculation=SpeculationConfig(drafter="ngram", num_draft_tokens=2), num_pages=16)
    output = llm.generate([[40] * 8], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))[0]
    assert len(output.metrics.speculation.drafted_per_position) <= 2
    ends = [event for event in llm.stream([40] * 8, GREEDY) if isinstance(event, Finished)]
    assert len(ends) == 1


def test_the_kv_pool_takes_what_was_asked_for(tiny_llama: Callable[..., Path]) -> None:
    llm = LLM(str(tiny_llama()), "off", kv_cache_gib=0.01)
    kv = llm.built.engine._runner.kv  # type: ignore[attr-defined]
    assert 0.009 < kv.numel() * kv.element_size() / 2**30 <= 0.01
