"""Fifty schemas on the demo model, sampled: answers validate or are cut with a valid prefix; drafts change nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from grammar.conftest import Vocab
from grammar.schemas import SCHEMAS, faults

from specserve.constraint import GrammarSpec
from specserve.llm import LLM, CompletionOutput
from specserve.request import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.demo, pytest.mark.timeout(1200)]

MAX_TOKENS = 512
PROMPT = "Write {} as JSON.\nJSON: "


def answers(llm: LLM, schemas: dict[str, dict[str, object]], **how: object) -> Sequence[CompletionOutput]:
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            seed=index,
            grammar=GrammarSpec("json_schema", json.dumps(schema)),
            **how,  # type: ignore[arg-type]
        )
        for index, schema in enumerate(schemas.values())
    ]
    return [out.outputs[0] for out in llm.generate([PROMPT.format(name) for name in schemas], params)]


@pytest.fixture(scope="module", params=[0.0, 0.8], ids=["greedy", "sampled"])
def both(request: pytest.FixtureRequest) -> tuple[Sequence[CompletionOutput], Sequence[CompletionOutput]]:
    """Every schema's answer with speculation on, and off."""
    runs = []
    for drafter in ("auto", "off"):
        llm = LLM(model="demo", speculation=drafter, max_num_seqs=16, max_model_len=1024, kv_cache_gib=0.5)
        runs.append(answers(llm, SCHEMAS, temperature=request.param))
        del llm
    return runs[0], runs[1]


def test_speculation_changes_no_token(
    both: tuple[Sequence[CompletionOutput], Sequence[CompletionOutput]],
) -> None:
    on, off = both
    for name, left, right in zip(SCHEMAS, on, off, strict=True):
        assert left.token_ids == right.token_ids, name
        assert (left.text, left.finish_reason) == (right.text, right.finish_reason), name


def test_finished_answers_validate_and_the_others_are_valid_prefixes(
    both: tuple[Sequence[CompletionOutput], Sequence[CompletionOutput]], demo: Vocab
) -> None:
    finished = 0
    for (name, schema), answer in zip(SCHEMAS.items(), both[0], strict=True):
        state = demo.start("json_schema", json.dumps(schema))
        state.accept(answer.token_ids)
        if answer.finish_reason == "stop":
            finished += 1
            assert not list(faults(json.loads(answer.text), schema)), (name, answer.text)
        else:
            assert answer.finish_reason == "length", name
            assert len(answer.token_ids) == MAX_TOKENS, name
            assert not state.finished
    assert finished >= 47


def test_forced_tokens_are_free_drafts() -> None:
    """A fixed format is mostly forced text, so fewer steps make it; alone, as prompts of others leave no room."""
    llm = LLM(model="demo", speculation="auto", max_model_len=1024, kv_cache_gib=0.5)
    lengths = {}
    for name in ("a fixed record", "a weather report"):
        (answer,) = answers(llm, {name: SCHEMAS[name]}, temperature=0.0)
        steps = answer.metrics.speculation
        lengths[name] = steps.num_committed_tokens / steps.num_steps
    print("acceptance length:", lengths)
    assert lengths["a fixed record"] >= 3.0
    assert lengths["a weather report"] >= 1.5
