"""Configuration, validation, proposals and the n-gram drafter: small pure things, each refused or computed exactly."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from specserve_drafts import make_drafter
from specserve_drafts.ngram import NgramDrafter

from specserve.config import EngineConfig, ModelLimits, SchedulerConfig, SpeculationConfig
from specserve.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from specserve.proposal import DraftRow, DraftTree
from specserve.request import Request, SamplingParams, SpeculationParams
from specserve.validation import validate

LIMITS = ModelLimits(vocab_size=100, max_model_len=64, pool_tokens=48, page_size=16, max_num_seqs=4, eos_token_ids=(0,))


def test_options_find_their_groups_and_unknown_ones_name_the_nearest() -> None:
    config = EngineConfig.from_options(model="demo", page_size=8, max_num_seqs=3, num_draft_tokens=7)
    assert (config.cache.page_size, config.scheduler.max_num_seqs, config.speculation.num_draft_tokens) == (8, 3, 7)
    with pytest.raises(ConfigError, match="Did you mean 'max_num_seqs'"):
        EngineConfig.from_options(max_num_seq=3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"kv_cache_gib": -1.0}, "kv_cache_gib is -1.0"),
        ({"max_num_batched_tokens": 8}, "at least max_num_seqs"),
        ({"dtype": "fp8"}, "allowed: auto, bfloat16, float32"),
        ({"num_draft_tokens": 65}, "0 to 64"),
        ({"ngram_min": 3, "ngram_max": 2}, "min <= max"),
        ({"threads": 0}, "threads is 0"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"kernels": "nativ"}, "Did you mean 'native'"),
        ({"max_num_seqs": "8"}, "must be an integer"),
        ({"page_size": 16.5}, "must be an integer"),
        ({"kv_cache_gib": "2"}, "must be a number"),
        ({"verification": "block"}, "needs a drafter that samples"),
        ({"verification": "none"}, "allowed: coupled, block"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig.from_options(**options)


def test_an_unknown_drafter_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'ngram'"):
        SpeculationConfig(drafter="ngrm")
    with pytest.raises(ValueError, match="no drafter is called"):
        make_drafter("psychic", SpeculationConfig(), None)
    with pytest.raises(ConfigError):
        SchedulerConfig(max_num_seqs=0)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("a",) * 65}, "stop"),
        ({"stop_token_ids": (100,)}, "stop_token_ids[0]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"n": 2.0}, "n"),
        ({"n": True}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"top_k": 2.5}, "top_k"),
        ({"logprobs": 1.5}, "logprobs"),
        ({"temperature": None}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_token_ids": (3.0,)}, "stop_token_ids"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stop": (1,)}, "stop"),
        ({"bad_words": (b"x",)}, "bad_words"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": {3: 101.0}}, "logit_bias[3]"),
        ({"logit_bias": {100: 1.0}}, "logit_bias[100]"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (5, -1)}, "allowed_token_ids[1]"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprobs": 0, "logprob_token_ids": tuple(range(100)) + (0,) * 29}, "logprob_token_ids"),
        ({"logprob_token_ids": (3,)}, "logprob_token_ids"),
    ],
)
def test_each_bad_parameter_is_refused_by_name(params: dict[str, object], field: str) -> None:
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(**params))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        validate(request, LIMITS)
    assert [v.field for v in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt_token_ids": ()}, "prompt"),
        ({"prompt_token_ids": (1, 100)}, "prompt_token_ids[1]"),
        ({"prompt_token_ids": (-1,)}, "prompt_token_ids[0]"),
        ({"speculation": SpeculationParams(drafter="medusa")}, "speculation.drafter"),
        ({"speculation": SpeculationParams(num_draft_tokens=65)}, "speculation.num_draft_tokens"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"priority": 1 << 31}, "priority"),
        ({"prompt_token_ids": (1.0,)}, "prompt_token_ids"),
        ({"speculation": SpeculationParams(num_draft_tokens=2.5)}, "speculation.num_draft_tokens"),  # type: ignore
    ],
)
def test_each_bad_field_is_refused_by_name(change: dict[str, object], field: str) -> None:
    request = Request(**({"request_id": "r", "prompt_token_ids": (1,)} | change))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        validate(request, LIMITS)
    assert [v.field for v in caught.value.violations] == [field]


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    validate(Request(request_id="r", prompt_token_ids=(1,) * 47), LIMITS)
    with pytest.raises(ContextLengthExceeded, match="whole KV pool of 48") as caught:
        validate(Request(request_id="r", prompt_token_ids=(1,) * 48), LIMITS)
    assert caught.value.metadata == {"limit": "48", "got": "49"}
    with pytest.raises(ContextLengthExceeded, match="max_tokens 40 = 50"):
        request = Request(request_id="r", prompt_token_ids=(1,) * 10, params=SamplingParams(max_tokens=40))
        validate(request, LIMITS)


def test_tree_faults_and_pruning() -> None:
    tree = DraftTree((5, 6, 7, 8), (-1, -1, 1, 2), ("t",) * 4)
    assert tree.depths() == [1, 1, 2, 3] and tree.fault(10) is None
    assert tree.prune(3, 9) == DraftTree((5, 6, 7), (-1, -1, 1), ("t",) * 3)
    assert tree.prune(9, 1) == DraftTree((5, 6), (-1, -1), ("t",) * 2)
    assert "outside the vocabulary" in str(tree.fault(8))
    assert "parent 1" in str(DraftTree((1, 2), (-1, 1), ("t",) * 2).fault(9))
    assert "siblings" in str(DraftTree((1, 1), (-1, -1), ("t",) * 2).fault(9))
    assert "drafters" in str(DraftTree((1,), (-1,), ()).fault(9))


@given(st.lists(st.integers(-1, 8), max_size=9), st.integers(0, 9), st.integers(0, 5))
def test_pruning_keeps_trees_whole(parents: list[int], nodes: int, depth: int) -> None:
    parents = [min(parent, i - 1) for i, parent in enumerate(parents)]
    tree = DraftTree(tuple(range(len(parents))), tuple(parents), ("t",) * len(parents))
    pruned = tree.prune(nodes, depth)
    assert pruned.fault(99) is None
    assert len(pruned) <= nodes and max(pruned.depths(), default=0) <= depth


def row(tokens: list[int]) -> DraftRow:
    return DraftRow(
        sequence_id="s", token_ids=tokens, prompt_len=1, cached_len=0, seed=0, choice=0, temperature=0.0, salt=""
    )


def scanned(tokens: list[int], shortest: int, longest: int, cap: int) -> list[int]:
    """The drafter's definition, by scanning."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size <= len(tokens) and tokens[end - size : end] == tokens[len(tokens) - size :]:
                period = len(tokens) - end
                return [tokens[end + i % period] for i in range(cap)]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    steps=st.lists(st.integers(1, 5), max_size=10),
    cap=st.integers(1, 8),
    sizes=st.sampled_from([(1, 4), (2, 3), (3, 3)]),
)
def test_ngram_equals_a_scan_whatever_the_steps(
    tokens: list[int], steps: list[int], cap: int, sizes: tuple[int, int]
) -> None:
    drafter = NgramDrafter(*sizes)
    known = tokens[:1]
    drafter.start(row(known))
    for step in [*steps, len(tokens)]:
        tree = drafter.propose([row(known)], [cap])[0]
        assert list(tree.token_ids) == scanned(known, *sizes, cap)
        assert tree.fault(4) is None
        known += tokens[len(known) : len(known) + step]
    drafter.stop(row(known))
    assert not drafter._tables


def test_ngram_looks_at_new_tokens_only() -> None:
    class Counting(list[int]):
        read = 0

        def __getitem__(self, item: object) -> object:  # type: ignore[override]
            Counting.read += 1
            return super().__getitem__(item)  # type: ignore[index]

    tokens = Counting(range(5000))
    drafter = NgramDrafter()
    drafter.start(row(tokens))
    drafter.propose([row(tokens)], [4])
    tokens.append(7)
    Counting.read = 0
    drafter.propose([row(tokens)], [4])
    assert Counting.read < 40
