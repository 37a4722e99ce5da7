"""Every Triton kernel compiled for the devices that it is meant for, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Tables are made in a process of their own: in this one Triton is an interpreter.
COMMAND = [sys.executable, "-W", "ignore", "-m", "specserve_kernels.triton.compile_table"]


def table(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("only", ["fast, 1 rows, 16/1 heads of 64", "add_rms_norm: 576", "rope_write_kv: 9/3"])
def test_a_few_compile_within_the_limits(only: str) -> None:
    made = table("--only", only, "--target", "90")
    assert made.returncode == 0, made.stderr
    lines = made.stdout.splitlines()[2:]
    assert lines and all(only in line and line.endswith(", 0 |") for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["80", "90", "100"])
def test_everything_compiles_within_the_limits(target: str) -> None:
    made = table("--target", target)
    assert made.returncode == 0, made.stderr


FAULTY = """
import sys
from dataclasses import replace
from specserve_kernels.triton import compile_table
measured = compile_table.measure
compile_table.measure = lambda *arguments: replace(measured(*arguments), {fault})
sys.argv = ["compile_table", "--only", "silu_mul: 33", "--target", "90"]
sys.exit(compile_table.main())
"""


@pytest.mark.parametrize(
    ("fault", "message"), [("spilled=8", "spills 8 bytes"), ("shared=228 << 10", "too much shared memory")]
)
def test_a_fault_fails(fault: str, message: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FAULTY.format(fault=fault)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 1 and message in made.stderr
