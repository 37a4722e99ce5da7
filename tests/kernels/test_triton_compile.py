"""Every Triton kernel compiled for the devices that it is meant for, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton_case  # noqa: F401  (chooses the interpreter for this process)
from specserve_kernels.triton import compile_table, gemm, kv, launch, norms, sampling, tree_attention
from specserve_kernels.triton.compile_table import BEGIN, END, SHARED_LIMIT, Compiled, Line, heading, markdown
from specserve_kernels.triton.launch import Launch
from specserve_kernels.triton.tree_attention import FP32_OVER_FP8

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"


@pytest.fixture(scope="module")
def launches() -> list[tuple[Line, Launch]]:
    """Every launch that is compiled for the table, recorded on tensors without memory."""
    return [*compile_table.launches(compile_table.cases())]


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


GOOD = Compiled(Line("some case", "some", 4), 80, shared=163 << 10, registers=255, spilled=0)


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


def test_every_kernel_is_in_the_table(launches: list[tuple[Line, Launch]]) -> None:
    modules = (gemm, kv, norms, sampling, tree_attention)
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert {made.kernel.__name__ for _, made in launches} == kernels


Block = tuple[str, int, int, int]


def blocks_launched(launches: list[tuple[Line, Launch]], **constants: object) -> set[Block]:
    """Of attention's launches with these constants: name of the table in launch.py, padded head size, keys, warps."""
    found: set[Block] = set()
    for _, made in launches:
        if made.kernel is tree_attention.attend_kernel and constants.items() <= made.constants.items():
            numerics = "exact" if made.constants["EXACT"] else "fast"
            name = "fp32" if made.arguments[0].dtype is torch.float32 else numerics
            found.add((name, made.constants["DIM_PADDED"], made.constants["BLOCK"], made.warps))
    return found


def test_every_block_of_attention_is_in_the_table(launches: list[tuple[Line, Launch]]) -> None:
    tables = {"exact": launch.EXACT_BLOCK, "fast": launch.FAST_BLOCK, "fp32": launch.FP32_BLOCK}
    known: set[Block] = {(name, dim, *entry) for name, blocks in tables.items() for dim, entry in blocks.items()}
    assert blocks_launched(launches) == known
    assert blocks_launched(launches, WINDOW=True) == blocks_launched(launches, PAGE=64) == known
    fp32_over_fp8 = {(name, dim, *entry) for name, dim, *entry in known if name == "fp32" and dim <= FP32_OVER_FP8}
    assert blocks_launched(launches, FP8=True) >= fp32_over_fp8


def test_the_table_in_the_docs_is_of_todays_launches(launches: list[tuple[Line, Launch]]) -> None:
    """As far as it can be known without compiling: the head, and of every line the kernel and its configuration."""
    head, rule, *rows = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip().splitlines()
    assert f"{head}\n{rule}" == heading(sorted(SHARED_LIMIT))
    listed = ["|".join(row.split("|")[:4]) + "|" for row in rows]
    assert listed == list(dict.fromkeys(str(line) for line, _ in launches))
