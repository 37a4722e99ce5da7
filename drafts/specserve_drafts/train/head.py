"""The EAGLE-3 head as a torch module, and its training-time test: its own outputs fed back, as when it drafts.

Row i of a sequence reads the target's features of token i and the embedding of token i + 1, and guesses token i + 2.
In step k of the test it reads its own output of step k - 1 instead of the features, the embedding of token
i + 1 + k, and guesses token i + 2 + k. What a row attends to: the step-0 keys of rows up to its own, and of the later
steps those at its own row, which is exactly what a chain of drafts sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Shape of a head; one Llama layer twice as wide at its input, with the target's sizes."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float = 10000.0


@dataclass(frozen=True, slots=True)
class Pack:
    """Some sequences, end to end. Queries are the rows whose guesses are judged, by their answer's tokens.

    A sequence of `len` rows has keys for all of them; its last `queries` rows are queries. The draft's row count is
    the sequence's length less two: the last rows have no token to guess.
    """

    features: Tensor  # [rows, 3 * hidden]
    next_ids: Tensor  # int64 [rows]: the token after each row's
    lengths: tuple[int, ...]
    num_queries: tuple[int, ...]
    query_ids: Tensor  # int64 [steps, queries]: the token whose embedding a query reads in each step
    targets: Tensor  # [steps, queries, hidden]: soft targets, see loss.py
    weights: Tensor  # fp32 [steps, queries]: of each guess in the loss; 0 = not judged
    guessed_ids: Tensor  # int64 [steps, queries]: the token that followed; -1 past the end


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [rows, 1, head_dim], halves repeated."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = torch.outer(positions.float(), 1.0 / theta**exponents)
    doubled = torch.cat((angles, angles), dim=-1)[:, None]
    return doubled.cos().to(dtype), doubled.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [rows, heads, head_dim], in halves."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class DraftHead(nn.Module):
    """fc, one decoder layer and a final norm; parameters are fp32 masters, computed with in `dtype`."""

    def __init__(self, config: HeadConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.q_proj = nn.Linear(2 * hidden, q_size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"):
            setattr(self, name, nn.RMSNorm(hidden, eps=config.rms_norm_eps))

    def initialize(self, generator: torch.Generator) -> None:
        """Small random matrices; the two that write to the residual start at a tenth of that."""
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                scale = 0.1 if name in ("o_proj", "down_proj") else 1.0
                std = scale * module.in_features**-0.5
                module.weight.data.normal_(0.0, std, generator=generator)

    def forward(self, pack: Pack, embed: Tensor, num_steps: int) -> list[Tensor]:
        """What the frozen head is to read in each step: normed outputs of the queries, [queries, hidden] each.

        `embed` is the target's embedding, [vocab, hidden].
        """
        weights = {name: parameter.to(self.dtype) for name, parameter in self.named_parameters()}
        step = _Step(self.config, weights, pack)
        hidden = pack.features @ weights["fc.weight"].T
        outputs: list[Tensor] = []
        for index in range(num_steps):
            if index == 0:
                hidden = step.first(F.embedding(pack.next_ids, embed), hidden)
            else:
                hidden = step.later(F.embedding(pack.query_ids[index], embed), hidden, index)
            outputs.append(rms_norm(hidden, weights["norm.weight"], self.config.rms_norm_eps))
        return outputs


class _Step:
    """The layer over one pack, with the keys and values of the steps so far."""

    def __init__(self, config: HeadConfig, weights: dict[str, Tensor], pack: Pack) -> None:
        self.config, self.weights, self.pack = config, weights, pack
        self.qkv = torch.cat([weights[f"{name}_proj.weight"] for name in "qkv"])
        device = pack.features.device
        spans = list(zip(pack.lengths, pack.num_queries, strict=True))
        self.positions = torch.cat([torch.arange(length, device=device) for length in pack.lengths])
        is_query = [torch.arange(length, device=device) >= length - count for length, count in spans]
        self.queries = torch.cat(is_query).nonzero()[:, 0]
        self.query_positions = self.positions[self.queries]
        self.masks = [_causal(length, count, device) for length, count in spans]
        self.first_keys: tuple[Tensor, ...] = ()
        self.first_values: tuple[Tensor, ...] = ()
        self.later_keys: list[Tensor] = []
        self.later_values: list[Tensor] = []

    def first(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Step 0: keys and values of all rows, outputs of the queries only."""
        config, dim = self.config, self.config.head_dim
        x = self._input(embedded, hidden)
        q_size = config.num_heads * dim
        keys_values = (x @ self.qkv[q_size:].T).view(-1, 2, config.num_kv_heads, dim)
        keys = rotate(keys_values[:, 0], *self._rotary(self.positions))
        self.first_keys = torch.split(keys, list(self.pack.lengths))
        self.first_values = torch.split(keys_values[:, 1], list(self.pack.lengths))
        q = (x[self.queries] @ self.qkv[:q_size].T).view(-1, config.num_heads, dim)
        return self._finish(rotate(q, *self._rotary(self.query_positions)), hidden[self.queries])

    def later(self, embedded: Tensor, hidden: Tensor, index: int) -> Tensor:
        """Step `index`: one more key and value at each query's own row, at the next position."""
        config, dim = self.config, self.config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = (self._input(embedded, hidden) @ self.qkv.T).view(-1, heads + 2 * kv_heads, dim)
        turned = rotate(qkv[:, : heads + kv_heads], *self._rotary(self.query_positions + index))
        self.later_keys.append(turned[:, heads:])
        self.later_values.append(qkv[:, heads + kv_heads :])
        return self._finish(turned[:, :heads], hidden)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(positions, self.config.head_dim, self.config.rope_theta, self.pack.features.dtype)

    def _input(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        eps, weights = self.config.rms_norm_eps, self.weights
        normed = rms_norm(embedded, weights["input_layernorm.weight"], eps)
        return torch.cat((normed, rms_norm(hidden, weights["hidden_norm.weight"], eps)), dim=-1)

    def _finish(self, q: Tensor, residual: Tensor) -> Tensor:
        weights, eps = self.weights, self.config.rms_norm_eps
        attended = self._attend(q).reshape(q.shape[0], -1)
        hidden = residual + attended @ weights["o_proj.weight"].T
        x = rms_norm(hidden, weights["post_attention_layernorm.weight"], eps)
        gate, up = x @ weights["gate_proj.weight"].T, x @ weights["up_proj.weight"].T
        return hidden + (F.silu(gate) * up) @ weights["down_proj.weight"].T

    def _attend(self, q: Tensor) -> Tensor:
        """q [queries, heads, head_dim] → the same shape; sequence by sequence."""
        counts = list(self.pack.num_queries)
        keys = torch.split(torch.stack(self.later_keys, dim=2), counts) if self.later_keys else None
        values = torch.split(torch.stack(self.later_values, dim=2), counts) if self.later_values else None
        found = []
        for index, part in enumerate(torch.split(q, counts)):
            own = None if keys is None or values is None else (keys[index], values[index])
            found.append(attend(part, self.first_keys[index], self.first_values[index], self.masks[index], own))
        return torch.cat(found)


def _causal(length: int, count: int, device: torch.device) -> Tensor:
    """bool [count, length]: what the last `count` of `length` rows may not see of step 0."""
    rows = torch.arange(length - count, length, device=device)
    return torch.arange(length, device=device)[None] > rows[:, None]


def attend(q: Tensor, keys: Tensor, values: Tensor, hidden_from: Tensor, own: Sequence[Tensor] | None = None) -> Tensor:
    """Attention of one sequence's queries: masked over step 0, and to their own keys of the later steps.

    Args:
        q: [queries, heads, dim]; keys, values: [rows, kv_heads, dim]; hidden_from: bool [queries, rows].
        own: keys and values of the steps since, each [queries, kv_heads, steps, dim].
    """
    count, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    grouped = (q * dim**-0.5).view(count, kv_heads, group, dim)
    folded = grouped.permute(1, 2, 0, 3).reshape(kv_heads, group * count, dim)
    scores = torch.bmm(folded, keys.permute(1, 2, 0)).view(kv_heads, group, count, -1)
    scores = scores.masked_fill(hidden_from, float("-inf"))
    if own is not None:
        diagonal = torch.einsum("qhgd,qhsd->hgqs", grouped, own[0])
        scores = torch.cat((scores, diagonal), dim=-1)
    probs = scores.softmax(-1)
    past = probs[..., : keys.shape[0]].reshape(kv_heads, group * count, -1)
    mixed = torch.bmm(past, values.transpose(0, 1)).view(kv_heads, group, count, dim).permute(2, 0, 1, 3)
    if own is not None:
        mixed = mixed + torch.einsum("hgqs,qhsd->qhgd", probs[..., keys.shape[0] :], own[1])
    return mixed.reshape(count, heads, dim)
