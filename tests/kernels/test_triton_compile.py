"""Every Triton kernel compiled for the devices that it is meant for, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import triton_case  # noqa: F401  (chooses the interpreter for this process)
from specserve_kernels.triton import compile_table
from specserve_kernels.triton.compile_table import Compiled, markdown


def table(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: in this one Triton is an interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "specserve_kernels.triton.compile_table", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_few_compile_within_the_limits() -> None:
    made = table("--target", "90", "--only", "fast, 1 rows, 16/1 heads of 64", "add_rms_norm: 576")
    assert made.returncode == 0, made.stderr
    lines = made.stdout.splitlines()[2:]
    assert len(lines) >= 2 and all(line.endswith(", 0 |") for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("target", ["80", "90", "100"])
def test_everything_compiles_within_the_limits(target: str) -> None:
    made = table("--target", target)
    assert made.returncode == 0, made.stderr


GOOD = Compiled("some case", "some", 80, warps=4, stages=2, shared=163 << 10, registers=255, spilled=0)


@pytest.mark.parametrize(
    ("result", "status", "message"),
    [
        (GOOD, 0, ""),
        (replace(GOOD, target=90, shared=227 << 10), 0, ""),
        (replace(GOOD, spilled=8), 1, "sm_80 some (some case) spills 8 bytes"),
        (replace(GOOD, shared=GOOD.shared + 1), 1, "needs too much shared memory"),
    ],
)
def test_a_fault_fails(
    result: Compiled, status: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_table, "compiled", lambda chosen, targets: iter([GOOD, result]))
    monkeypatch.setattr(sys, "argv", ["compile_table"])
    assert compile_table.main() == status
    printed = capsys.readouterr()
    assert message in printed.err and bool(printed.err) == bool(status)
    assert "| some case | `some` | 4 | 166,912 B, 255, 0 |" in markdown([GOOD])


def test_every_kernel_is_in_the_table() -> None:
    from specserve_kernels.triton import gemm, kv, launch, norms, sampling, tree_attention

    with launch.recording() as launches:
        for case in compile_table.cases():
            case.call()
    modules = (gemm, kv, norms, sampling, tree_attention)
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert {made.kernel.__name__ for made in launches} == kernels
