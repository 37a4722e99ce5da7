"""The memory budget: everything is counted before the pool, nothing is promised twice, and a refusal says why.

What drafters will take is told by shapes; the tests load them and add up what is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import specserve_kernels
from eagle_files import head_config, head_tensors, write_head
from hypothesis import given
from hypothesis import strategies as st
from specserve_drafts import draft_footprint, make_drafter
from specserve_drafts.draft_rows import SCRATCH_SLOTS
from tiny import TinyLlama
from torch import Tensor

from specserve.buckets import Bucket, make_buckets
from specserve.config import GIB, EngineConfig
from specserve.errors import ConfigError
from specserve.gpu_memory import Demand, ModelSizes, activation_bytes, graph_bytes, logits_bytes, plan_memory
from specserve.models.decoder import Decoder
from specserve.models.weights import load_decoder
from specserve.runner import CpuRunner

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
    nothing = dict.fromkeys(("others", "weights", "drafters", "logits", "activations", "attention", "graphs"), 0)
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
    plan = plan_memory(100 * GIB, 0.5, demand(weights=15 * GIB, drafters=GIB), 1 << 20, 16, 16)
    assert plan.line == "GPU memory (GiB): 50.00 of 100.00; weights 15.00, drafters 1.00, KV pool 34.00"


def test_parts_of_an_8b_model() -> None:
    assert logits_bytes(64, 128256) == 3 * 64 * 128256 * 4
    assert activation_bytes(512, LLAMA_8B) == 512 * (4 * 4096 + 3 * 14336) * 2
    buckets = make_buckets(128, 512, 16, lambda pages: 1 << 30).known
    assert graph_bytes(buckets, LLAMA_8B) > len(buckets) * (8 << 20) + activation_bytes(128, LLAMA_8B)
    assert graph_bytes([], LLAMA_8B) == 0
    assert graph_bytes([Bucket(8, 0, 64)], LLAMA_8B) < graph_bytes([Bucket(8, 8, 64)], LLAMA_8B)


# ---- drafters

PAGE, PAGES = 32, 8


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors that a head or the weights of a decoder hold."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)
    elif is_dataclass(value):
        for item in fields(value):
            yield from tensors_of(getattr(value, item.name))


def bytes_of(*values: Any, but: Any = ()) -> int:
    """Of the memory behind them, each piece once, without the pieces that `but` holds too."""
    known = {tensor.data_ptr() for tensor in tensors_of(but)}
    found = {tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(values)}
    return sum(size for place, size in found.items() if place not in known)


def target_of(folder: Path, quantization: str | None, dtype: str = "bfloat16") -> CpuRunner:
    """The reference's operations keep weights as a device does, without a second copy."""
    decoder = load_decoder(folder, specserve_kernels.load("reference"), dtype, quantization)
    return CpuRunner(decoder, decoder.ops, PAGES, PAGE)


def config_of(quantization: str | None, **options: Any) -> EngineConfig:
    return EngineConfig.from_options(quantization=quantization, page_size=PAGE, drafter="off", **options)


def counted(config: EngineConfig, target: Decoder) -> tuple[int, int]:
    return draft_footprint(config, target.config, target.dtype.itemsize, target.fingerprint)


def taken(runner: CpuRunner, kv: Tensor, weights: int) -> tuple[int, int]:
    """Bytes per token and all others, of a loaded drafter."""
    per_slot = kv.nbytes // (kv.shape[2] * PAGE)
    assert (kv.shape[2] - PAGES) * PAGE == SCRATCH_SLOTS
    kept = sum(tensor.nbytes for tensor in runner.kept._all())
    return per_slot + kept // (PAGES * PAGE), weights + SCRATCH_SLOTS * per_slot


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_model_is_counted_as_it_is_loaded(tiny_llama: TinyLlama, tied: bool, quantization: str | None) -> None:
    folder = tiny_llama(layers=3, tied=tied, hidden=64, max_positions=256)
    runner = target_of(tiny_llama(), quantization)
    config = config_of(quantization, draft_model=str(folder))
    drafter: Any = make_drafter("draft_model", config.speculation, runner)
    weights = bytes_of(drafter._decoder.weights, drafter._decoder.rope_table)
    assert counted(config, runner.decoder) == taken(runner, drafter._layers.kv, weights)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, {"num_features": 2}),
        ({"eagle_aux_hidden_state_layer_ids": [2], "num_hidden_layers": 2}, {"num_features": 1, "own_head": False}),
        ({"eagle_aux_hidden_state_layer_ids": [1], "norm_before_fc": True}, {"num_features": 1, "own_embedding": True}),
        (
            {"eagle_aux_hidden_state_layer_ids": [1], "draft_vocab_size": None, "fc_norm": True},
            {"num_features": 1, "own_head": False},
        ),
        ({"draft_vocab_size": None}, {"eagle1": True, "bias": True}),
    ],
    ids=["two features", "two layers, the target's head", "own embedding", "whole vocabulary", "EAGLE-1"],
)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_head_is_counted_as_it_is_loaded(
    tiny_llama: TinyLlama, tmp_path: Path, options: dict[str, Any], parts: dict[str, Any], quantization: str | None
) -> None:
    folder = tiny_llama(tied=False)
    runner, raw = target_of(folder, quantization), json.loads((folder / "config.json").read_text())
    head = head_config(raw, **options)
    head["draft_vocab_size"] = head["draft_vocab_size"] or raw["vocab_size"]
    tensors = head_tensors(head, **parts)
    tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items() if tensor.is_floating_point()}
    if parts.get("eagle1"):
        del head["draft_vocab_size"]
    config = config_of(quantization, eagle_head=str(write_head(tmp_path, head, tensors)))
    drafter: Any = make_drafter("eagle", config.speculation, runner)
    target = (runner.decoder.weights, runner.decoder.rope_table)
    weights = bytes_of(list(vars(drafter.head).values()), but=target)
    assert counted(config, runner.decoder) == taken(runner, drafter._layers.kv, weights)


def test_without_weights_nothing_is_counted_but_kept_rows(tiny_llama: TinyLlama) -> None:
    target = target_of(tiny_llama(), None).decoder
    assert counted(config_of(None, early_exit_layers=1), target) == (0, 0)
    recycling = EngineConfig.from_options(drafter="recycling")
    assert counted(recycling, target) == (2 * target.config.hidden_size, 0)
