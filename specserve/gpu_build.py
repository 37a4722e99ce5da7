"""What an engine on a GPU is made of: the device, its operations, its share of memory, its runner.

Nothing here is loaded where the configuration says CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast

import torch
from specserve_kernels import Ops
from specserve_kernels.triton import TritonOps, rows_of_one_launch
from specserve_kernels.triton.launch import ATTENTION_WORKSPACE_BYTES

from specserve.buckets import make_buckets
from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.gpu_memory import (
    Demand,
    MemoryPlan,
    ModelSizes,
    activation_bytes,
    graph_bytes,
    logits_bytes,
    plan_memory,
)
from specserve.gpu_runner import GpuRunner
from specserve.graphs import CudaGraphs
from specserve.models.decoder import Decoder, DecoderConfig


def device_of(config: EngineConfig) -> torch.device:
    """The GPU that an engine runs on.

    Raises:
        ConfigError: there is none, or an option does not go with one.
    """
    if not torch.cuda.is_available():
        raise ConfigError(f"device is {config.device!r} and torch {torch.__version__} finds no CUDA device here")
    if config.kernels != "auto":
        raise ConfigError(f"kernels is {config.kernels!r}; on a GPU they are always Triton's, leave it at 'auto'")
    return torch.device("cuda", torch.cuda.current_device())


def gpu_ops(config: EngineConfig) -> Ops:
    """Triton's kernels in the numerics asked for."""
    return cast(Ops, TritonOps(exact=config.numerics == "exact"))


class Held(NamedTuple):
    """Bytes that no size of the target tells: in use by others, of its weights as allocated, of drafters to come."""

    others: int
    weights: int
    drafters: int


def memory_plan(
    config: EngineConfig, decoder: Decoder, max_model_len: int, page_bytes: int, drafters: int
) -> MemoryPlan:
    """The device's memory, shared out; the weights are on it already, and `drafters` bytes are still to come.

    Raises:
        ConfigError: one context of `max_model_len` does not fit.
    """
    free, total = torch.cuda.mem_get_info(decoder.device)
    weights = torch.cuda.memory_allocated(decoder.device)
    held = Held(max(total - free - weights, 0), weights, drafters)
    demand = demand_of(config, decoder.config, decoder.dtype.itemsize, max_model_len, held)
    cache = config.cache
    return plan_memory(total, cache.gpu_memory_utilization, demand, page_bytes, cache.page_size, max_model_len)


def demand_of(config: EngineConfig, model: DecoderConfig, itemsize: int, max_model_len: int, held: Held) -> Demand:
    """What is taken before the pool gets any. Every row of a step may draw: a request may ask for its prompt's logits.

    A draft forward runs between two steps, in the memory that steps without a graph are counted for.
    """
    sizes = ModelSizes(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        itemsize=itemsize,
    )
    page_size, rows = config.cache.page_size, config.scheduler.max_num_batched_tokens
    exact = config.numerics == "exact"

    def most_rows(pages: int) -> int:
        return rows_of_one_launch(model.num_attention_heads, model.head_dim, pages * page_size, exact=exact)

    buckets = make_buckets(rows, -(-max_model_len // page_size), page_size, most_rows)
    return Demand(
        others=held.others,
        weights=held.weights,
        drafters=held.drafters,
        logits=logits_bytes(rows, model.vocab_size),
        activations=activation_bytes(rows, sizes),
        attention=ATTENTION_WORKSPACE_BYTES,
        graphs=graph_bytes(buckets.known, sizes),
    )


def make_runner(config: EngineConfig, decoder: Decoder, num_pages: int, max_model_len: int, folder: Path) -> GpuRunner:
    """A runner with real graphs, not captured yet."""
    page_size = config.cache.page_size
    return GpuRunner(
        decoder,
        num_pages,
        page_size,
        CudaGraphs(decoder.device),
        max_rows=config.scheduler.max_num_batched_tokens,
        max_pages=-(-max_model_len // page_size),
        folder=folder,
    )
