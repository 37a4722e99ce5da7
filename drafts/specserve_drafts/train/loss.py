"""The head loss: soft cross-entropy against the target over the draft vocabulary, without a tensor of all logits.

Its gradient in a row x is (softmax(x Wᵀ) − q) W, and q W is one fixed vector per target row: it is made once, by
`soft_targets`, and is all that training has to know of the target's distribution. So a step needs the draft's own
logits only, and those chunk by chunk, small enough to stay in cache; the gradient is made in the forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ROWS = 256  # measured best of 64 to 1024 at 16384 draft ids: 8 MB of bf16 logits


def soft_targets(hidden: Tensor, head: Tensor) -> Tensor:
    """q W of each row, [rows, hidden]; q = softmax(hidden Wᵀ), W = the target head's draft rows [vocab, hidden]."""
    found = torch.empty_like(hidden)
    for start in range(0, hidden.shape[0], CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        found[part] = torch.softmax(hidden[part] @ head.T, dim=-1) @ head
    return found


class SoftCrossEntropy(torch.autograd.Function):
    """Σ weight · (−Σ_v q_v log p_v) over rows, with p = softmax(x Wᵀ) and `targets` = q W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: Tensor, weights: Tensor, head: Tensor) -> Tensor:
        """x, targets [rows, hidden] in one dtype; weights fp32 [rows]; head [vocab, hidden] → fp32 scalar."""
        grad = torch.empty_like(x)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        logits = torch.empty(min(CHUNK_ROWS, x.shape[0]), head.shape[0], dtype=x.dtype, device=x.device)
        for start in range(0, x.shape[0], CHUNK_ROWS):
            part = slice(start, min(start + CHUNK_ROWS, x.shape[0]))
            rows, weight = x[part], weights[part, None]
            chunk = torch.mm(rows, head.T, out=logits[: rows.shape[0]])
            peak = chunk.amax(-1).float()
            probs = torch.softmax(chunk, dim=-1, out=chunk) if chunk.dtype == torch.float32 else chunk.softmax(-1)
            normalizer = peak - probs.amax(-1).float().log()  # log-sum-exp, read off the likeliest token
            agreement = (rows.float() * targets[part].float()).sum(-1)  # Σ_v q_v · logit_v
            total += (weight[:, 0] * (normalizer - agreement)).sum()
            grad[part] = (weight * (torch.mm(probs, head).float() - targets[part].float())).to(x.dtype)
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grad_outputs[0].to(grad.dtype), None, None, None
