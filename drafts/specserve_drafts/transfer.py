"""From main memory to where a target runs, in one go: drafters lay out their rows on the host, a few numbers each.

A transfer costs a device the same few microseconds whether it moves one number or thousands, and a draft forward reads
nine small arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Bytes. Triton compiles a kernel apart for addresses that are no multiple of 16, and nobody waits for that twice.
ALIGNMENT = 16


def in_one_transfer(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies on the device, contiguous and aligned; where the device is main memory, the tensors themselves."""
    if device.type == "cpu":
        return list(tensors)
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, part in zip(tensors, torch.split(staged, sizes), strict=True):
        part[: tensor.nbytes] = tensor.flatten().view(torch.uint8)
    moved = torch.split(staged.to(device, non_blocking=True), sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for tensor, part in zip(tensors, moved, strict=True)
    ]
