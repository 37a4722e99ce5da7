"""How a GPU's memory is shared out: everything else is counted first, and the KV pool gets what is left.

What is counted: what others hold, the target's weights and the drafters', the logits of the rows that a step may draw
from (in as many copies as live at once), the largest step's activations, attention's partial results, and the CUDA
graphs with their static buffers. The sum stays below the share of the device that the configuration allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from specserve.buckets import Bucket
from specserve.config import GIB
from specserve.errors import ConfigError

FP32 = 4  # bytes
LOGIT_COPIES = 3  # what the head gives, the graphs' own place for them, the sampler's scratch
GRAPH_BYTES = 8 << 20  # of one graph's launches, not yet measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What a step's memory depends on; names as in DecoderConfig. `itemsize`: bytes of an activation."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    itemsize: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Bytes that are taken before the pool gets any."""

    others: int  # other processes, the driver's context, what is allocated and is not weights
    weights: int
    drafters: int  # their weights, rotary tables and scratch; what they keep of each token is in the pool's pages
    logits: int
    activations: int
    attention: int
    graphs: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The whole of a device, shared out; bytes."""

    device: int
    allowed: int
    demand: Demand
    num_pages: int
    page_bytes: int

    @property
    def line(self) -> str:
        """One line for the start-up log."""
        parts = [(field.name, getattr(self.demand, field.name)) for field in fields(self.demand)]
        told = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in parts if size)
        pool = self.num_pages * self.page_bytes / GIB
        return f"GPU memory (GiB): {self.allowed / GIB:.2f} of {self.device / GIB:.2f}; {told}, KV pool {pool:.2f}"


def logits_bytes(rows: int, vocab_size: int) -> int:
    """fp32 logits of so many rows, in all their copies."""
    return LOGIT_COPIES * rows * vocab_size * FP32


def activation_bytes(rows: int, model: ModelSizes) -> int:
    """The most that is alive at once in a forward: the residual stream, its norm, and the widest pair of a layer."""
    heads, kv_heads, inner = model.num_attention_heads, model.num_key_value_heads, model.intermediate_size
    attention = 3 * (heads + 2 * kv_heads) * model.head_dim  # q, k, v; rotated; attended and apart again
    widest = max(attention, 3 * inner)  # gate and up, and their product
    return rows * (4 * model.hidden_size + widest) * model.itemsize


def graph_bytes(buckets: Iterable[Bucket], model: ModelSizes) -> int:
    """The graphs' launches, their inputs, and one pool that all share: as large as the largest needs it."""
    known = list(buckets)
    inputs = sum(8 * (3 * b.rows + b.rows) + 4 * b.rows * (5 + b.tail_slots + b.pages) for b in known)
    largest = max((activation_bytes(bucket.rows, model) for bucket in known), default=0)
    return len(known) * GRAPH_BYTES + inputs + largest


def plan_memory(
    device: int, utilization: float, demand: Demand, page_bytes: int, page_size: int, min_tokens: int
) -> MemoryPlan:
    """How many pages the pool gets.

    Args:
        device: bytes of the device.
        utilization: the share of it that may be used, by others too.
        min_tokens: the context that must fit.

    Raises:
        ConfigError: it does not; the message has both numbers.
    """
    allowed = int(device * utilization)
    num_pages = max(allowed - demand.total, 0) // page_bytes
    need = -(-min_tokens // page_size)
    plan = MemoryPlan(device=device, allowed=allowed, demand=demand, num_pages=num_pages, page_bytes=page_bytes)
    if num_pages < need:
        raise ConfigError(
            f"gpu_memory_utilization {utilization} leaves room for {num_pages * page_size} tokens of KV; one context of"
            f" {min_tokens} tokens needs {need * page_bytes / GIB:.3f} GiB. {plan.line};"
            " raise it or lower max_model_len"
        )
    return plan
