"""The operations under a forward pass, and the explicit choice of who computes them.

`load` picks one backend by name, once, at start; nothing falls back later. `describe` says what a name stands for
on this machine and, where the native library was passed over, why, so that start-up can print it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast

from specserve_kernels.ops import (
    QUANTIZATIONS,
    AttentionRows,
    DecoderModel,
    FusedDecoder,
    FusedSampler,
    LinearWeight,
    Ops,
)

PURPOSE_TARGET = 0
PURPOSE_DRAFT = 1
PURPOSE_ACCEPTANCE = 2

BACKENDS = ("auto", "native", "reference", "torch", "triton")

__all__ = [
    "BACKENDS",
    "PURPOSE_ACCEPTANCE",
    "PURPOSE_DRAFT",
    "PURPOSE_TARGET",
    "QUANTIZATIONS",
    "AttentionRows",
    "BackendDescription",
    "BackendUnavailable",
    "DecoderModel",
    "FusedDecoder",
    "FusedSampler",
    "LinearWeight",
    "Ops",
    "describe",
    "load",
]


class BackendUnavailable(RuntimeError):
    """The named backend cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class BackendDescription:
    """What `load` gives for a name on this machine."""

    name: str  # "reference", "torch", "native" or "triton"
    native_unavailable: str | None = None  # why "auto" did not take native; None if it did or was not asked
    isa: str | None = None  # instructions that native code runs on: "amx", "avx512" or "plain"

    def __str__(self) -> str:
        """One line for the start-up log."""
        if self.isa is not None:
            return f"{self.name} ({self.isa})"
        return self.name if self.native_unavailable is None else f"{self.name} (no native: {self.native_unavailable})"


def load(backend: str = "auto") -> Ops:
    """The operations of `backend`: "reference", "torch", "native", "triton" or "auto" (native, else torch).

    "triton" is exact numerics on a GPU; specserve_kernels.triton makes others. Raises ValueError for an unknown name
    and BackendUnavailable where "native" or "triton" is asked for and cannot be loaded.
    """
    return _resolve(backend)[0]


def describe(backend: str = "auto") -> BackendDescription:
    """Which operations `load(backend)` gives here, and why not the native ones. Raises what `load` raises."""
    return _resolve(backend)[1]


def _resolve(backend: str) -> tuple[Ops, BackendDescription]:
    if backend not in BACKENDS:
        raise ValueError(f"unknown kernel backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    if backend == "triton":
        return _load_triton(), BackendDescription("triton")
    reason = None
    if backend in ("auto", "native"):
        try:
            ops, isa = _load_native()
            return ops, BackendDescription("native", isa=isa)
        except BackendUnavailable as error:
            if backend == "native":
                raise
            reason = str(error)
    name = "reference" if backend == "reference" else "torch"
    module = importlib.import_module("specserve_kernels.reference" if name == "reference" else _TORCH_OPS)
    return cast(Ops, module), BackendDescription(name, reason)


_TORCH_OPS = "specserve_kernels.cpu.torch_ops"


def _load_triton() -> Ops:
    try:
        return cast(Ops, importlib.import_module("specserve_kernels.triton").TritonOps())
    except ImportError as error:
        raise BackendUnavailable(str(error)) from error


def _load_native() -> tuple[Ops, str]:
    try:
        native = importlib.import_module("specserve_kernels.cpu.native")
    except ImportError as error:
        raise BackendUnavailable(str(error)) from error
    try:
        ops = native.load()
        return cast(Ops, ops), ops.isa
    except native.NativeUnavailable as error:
        raise BackendUnavailable(str(error)) from error
