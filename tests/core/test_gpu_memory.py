"""The memory budget: everything is counted before the pool, nothing is promised twice, and a refusal says why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.buckets import Bucket, make_buckets
from specserve.config import GIB
from specserve.errors import ConfigError
from specserve.gpu_memory import Demand, ModelSizes, activation_bytes, graph_bytes, logits_bytes, plan_memory

LLAMA_8B = ModelSizes(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    itemsize=2,
)
some_bytes = st.integers(0, 8 * GIB)


def demand(**given: int) -> Demand:
    nothing = dict.fromkeys(("others", "weights", "draft_weights", "logits", "activations", "attention", "graphs"), 0)
    return Demand(**nothing | given)


@given(
    st.builds(Demand, **dict.fromkeys(Demand.__dataclass_fields__, some_bytes)),
    st.integers(1, 160 * GIB),
    st.floats(0.01, 1.0),
    st.integers(1, 1 << 22),
)
def test_the_sum_stays_below_what_is_allowed(taken: Demand, device: int, share: float, page_bytes: int) -> None:
    try:
        plan = plan_memory(device, share, taken, page_bytes, 16, min_tokens=1000)
    except ConfigError:
        assert taken.total + 63 * page_bytes > int(device * share)
        return
    used = taken.total + plan.num_pages * page_bytes
    assert used <= plan.allowed <= device
    assert used + page_bytes > plan.allowed and plan.num_pages * 16 >= 1000


@given(some_bytes, st.sampled_from(sorted(Demand.__dataclass_fields__)))
def test_every_part_takes_from_the_pool(size: int, name: str) -> None:
    free = plan_memory(80 * GIB, 0.9, demand(), 1 << 20, 16, 16)
    less = plan_memory(80 * GIB, 0.9, demand(**{name: size}), 1 << 20, 16, 16)
    assert free.num_pages - less.num_pages == pytest.approx(size / (1 << 20), abs=1)


@given(st.floats(0.2, 0.99), st.floats(0.0, 0.01))
def test_more_may_be_used_where_more_is_allowed(share: float, more: float) -> None:
    low, high = (plan_memory(80 * GIB, s, demand(weights=GIB), 1 << 20, 16, 16) for s in (share, share + more))
    assert low.num_pages <= high.num_pages


def test_a_refusal_has_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"leaves room for 0 tokens .* of 8192 tokens needs 1.000 GiB.*weights 15.00"):
        plan_memory(16 * GIB, 0.9, demand(weights=15 * GIB), 2 << 20, 16, 8192)


def test_the_line_tells_every_part_that_takes_something() -> None:
    plan = plan_memory(100 * GIB, 0.5, demand(weights=15 * GIB, draft_weights=GIB), 1 << 20, 16, 16)
    assert plan.line == "GPU memory (GiB): 50.00 of 100.00; weights 15.00, draft weights 1.00, KV pool 34.00"


def test_parts_of_an_8b_model() -> None:
    assert logits_bytes(64, 128256) == 3 * 64 * 128256 * 4
    assert activation_bytes(512, LLAMA_8B) == 512 * (4 * 4096 + 3 * 14336) * 2
    buckets = make_buckets(128, 512, 16, lambda pages: 1 << 30).known
    assert graph_bytes(buckets, LLAMA_8B) > len(buckets) * (8 << 20) + activation_bytes(128, LLAMA_8B)
    assert graph_bytes([], LLAMA_8B) == 0
    assert graph_bytes([Bucket(8, 0, 64)], LLAMA_8B) < graph_bytes([Bucket(8, 8, 64)], LLAMA_8B)
