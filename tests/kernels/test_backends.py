"""Choosing a backend: by name, once, and saying why native was passed over."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import specserve_kernels
from specserve_kernels import BackendUnavailable, describe, load


class Unavailable(RuntimeError):
    """What a native module raises."""


def native_module(ops: object | None) -> ModuleType:
    """A stand-in for `specserve_kernels.cpu.native`."""

    def load_native() -> object:
        if ops is None:
            raise Unavailable("no compiler")
        return ops

    module = ModuleType("specserve_kernels.cpu.native")
    module.NativeUnavailable = Unavailable  # type: ignore[attr-defined]
    module.load = load_native  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_a_name_gives_that_backend(name: str) -> None:
    assert load(name).name == name
    assert str(describe(name)) == name


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of auto, native, reference, torch, triton"):
        load("cuda")


def test_auto_takes_native_where_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = SimpleNamespace(isa="plain")
    monkeypatch.setitem(sys.modules, "specserve_kernels.cpu.native", native_module(ops))
    assert load("auto") is ops and load("native") is ops
    assert describe("auto") == specserve_kernels.BackendDescription("native", isa="plain")


@pytest.mark.parametrize(("module", "reason"), [(native_module(None), "no compiler"), (None, "halted; None in")])
def test_auto_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, reason: str) -> None:
    monkeypatch.setitem(sys.modules, "specserve_kernels.cpu.native", module)
    assert load("auto").name == "torch"
    assert reason in str(describe("auto"))
    with pytest.raises(BackendUnavailable, match=reason):
        load("native")
