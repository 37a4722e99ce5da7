"""Triton's kernels on CPU tensors: its interpreter, chosen before anything imports Triton, and made quick enough.

Import this first. The interpreter patches Triton's language anew at every call of one kernel function from another;
once per launch is enough, and three times as fast.
"""

from __future__ import annotations

import os
import sys
from typing import Any

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("something imported Triton as a compiler; set TRITON_INTERPRET=1 before it does")
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from specserve_kernels.triton import TritonOps, tiled
from torch import Tensor
from triton.runtime import interpreter

__all__ = ["EXACT", "FAST", "bits", "normal", "tiled"]

EXACT, FAST = TritonOps(exact=True), TritonOps(exact=False)

_patched: set[str] = set()
_launch = interpreter.GridExecutor.__call__


def _start(self: Any, *args: Any, **kwargs: Any) -> Any:
    _patched.clear()
    with np.errstate(all="ignore"):  # a device warns of nothing
        return _launch(self, *args, **kwargs)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.fn.__module__ not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(self.fn.__module__)
    return self.rewrite()(*args, **kwargs)


if hasattr(interpreter.InterpretedFunction, "rewrite"):
    interpreter.GridExecutor.__call__ = _start
    interpreter.InterpretedFunction.__call__ = _call


def normal(*size: int, dtype: torch.dtype = torch.float32, spread: float = 1.0, seed: int = 0) -> Tensor:
    """Random values of one type."""
    return (torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def bits(x: Tensor) -> Tensor:
    """The bits as integers: NaN equals itself, and −0 is not +0."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
