"""What the kernels need of a device, found without one: every launch compiled ahead of time, as a table.

`python -m specserve_kernels.triton.compile_table [--write docs/kernels.md] [--target 90 …] [--only WORD]` runs each
operation on tensors without memory in the shapes below, records the launches (launch.recording), compiles each for
each target with the toolchain that Triton ships, and reads shared memory, registers and spills. It ends with 1 if a
kernel spills or wants more shared memory than a block of its target may have.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve_kernels.ops import AttentionRows, LinearWeight
from specserve_kernels.triton import TiledRows, TritonOps, gemm, launch, rows_in_tile
from specserve_kernels.triton.launch import Launch
from specserve_kernels.triton.tree_attention import FP32_OVER_FP8

SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes a block may have
BEGIN, END = "<!-- compile table: begin -->", "<!-- compile table: end -->"
_TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int8: "i8",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration: a call of an operation in one shape."""

    name: str
    call: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Line:
    """What a line of the table is about: one kernel of one configuration."""

    case: str
    kernel: str
    warps: int

    def __str__(self) -> str:
        return f"| {self.case} | `{self.kernel}` | {self.warps} |"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the kernel of a line needs on one target."""

    line: Line
    target: int  # compute capability × 10
    shared: int  # bytes
    registers: int  # of a thread
    spilled: int  # bytes of a thread, of stack or local memory

    @property
    def fault(self) -> str | None:
        """Why this may not ship, or None."""
        if self.spilled:
            return f"spills {self.spilled} bytes"
        return "needs too much shared memory" if self.shared > SHARED_LIMIT[self.target] else None


def empty(*size: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return torch.empty(size, dtype=dtype, device="meta")


def _attention_rows(
    rows: int, depth: int, pages: int, group: int, dim: int, dtype: torch.dtype, planned: bool
) -> AttentionRows:
    fields = (
        empty(rows, dtype=torch.int32), empty(rows, dtype=torch.int32), empty(rows, depth, dtype=torch.int32),
        empty(rows, dtype=torch.int32), empty(rows, pages, dtype=torch.int32),
    )  # fmt: skip
    if not planned:
        return AttentionRows(*fields)
    most = rows_in_tile(group, dim, dtype)
    tiles = -(-rows // most)
    first = tuple(range(0, rows, most))
    return TiledRows(*fields, tiles=empty(tiles, 2, dtype=torch.int32), rows_in_tile=min(most, rows), first_rows=first)


def _attention(
    dim: int, dtype: torch.dtype, page: int, *, exact: bool, rows: int, depth: int = 0, heads: int = 32,
    kv_heads: int = 8, fp8: bool = False, window: int = 0, planned: bool = True, length: int = 8192,
) -> Case:  # fmt: skip
    kind = f"{'exact' if exact else 'fast'}, {rows} {'nodes' if depth else 'rows'}, {heads}/{kv_heads} heads of {dim}"
    kind += f", page {page}, {_TYPES[dtype]}{' × e4m3' if fp8 else ''}{f', window {window}' if window else ''}"

    def call() -> object:
        cache = empty(1000, kv_heads, page, dim, dtype=torch.uint8 if fp8 else dtype)
        scales = empty(2, kv_heads, dtype=torch.float32) if fp8 else None
        some = _attention_rows(rows, depth, length // page, heads // kv_heads, dim, dtype, planned)
        ops = TritonOps(exact=exact, window=window)
        return ops.attention(empty(rows, heads, dim, dtype=dtype), cache, cache, some, 0.1, scales)

    return Case(f"attention: {kind}{'' if planned else ', unplanned'}", call)


def attention_cases() -> Iterator[Case]:
    """Head sizes × numerics × single row, tree and chunk; then the other choices, each with a few partners."""
    half, full = torch.float16, torch.float32
    for dim, exact in itertools.product((16, 32, 64, 80, 96, 128, 256), (True, False)):
        if dim >= 64:  # what models have; smaller heads are only to have every block of launch.py in the table
            yield _attention(dim, torch.bfloat16, 16, exact=exact, rows=1)
            yield _attention(dim, torch.bfloat16, 32, exact=exact, rows=512)
            yield _attention(dim, torch.bfloat16, 16, exact=exact, rows=16, depth=8, fp8=True)
        yield _attention(dim, torch.bfloat16, 16, exact=exact, rows=16, depth=8)
        yield _attention(dim, torch.bfloat16, 64, exact=exact, rows=16, depth=8, window=4096)
        yield _attention(dim, full, 16, exact=exact, rows=16, depth=8)
        fp8 = dim <= FP32_OVER_FP8
        yield _attention(dim, full, 64, exact=exact, rows=16, depth=8, fp8=fp8, window=4096)
    yield _attention(128, half, 64, exact=False, rows=16, depth=8, window=4096)
    yield _attention(128, half, 64, exact=True, rows=16, depth=8, window=4096)
    yield _attention(128, half, 32, exact=False, rows=16, depth=8, fp8=True, heads=8)
    yield _attention(64, torch.bfloat16, 16, exact=True, rows=16, depth=8, heads=9, kv_heads=3, planned=False)
    yield _attention(64, torch.bfloat16, 16, exact=False, rows=64, depth=8, heads=9, kv_heads=3)
    yield _attention(64, torch.bfloat16, 16, exact=False, rows=1, heads=16, kv_heads=1)


def kv_cases() -> Iterator[Case]:
    """Writes of the demo model's and of an 8B model's shape, and moves."""
    ops, ids = TritonOps(), empty(16, dtype=torch.int64)
    for heads, kv_heads, dim, dtype, fp8 in [
        (32, 8, 128, torch.bfloat16, False),
        (9, 3, 64, torch.bfloat16, False),
        (32, 8, 128, torch.bfloat16, True),
        (8, 4, 256, torch.float16, True),
        (12, 12, 80, torch.float32, False),
    ]:
        cache = empty(1000, kv_heads, 16, dim, dtype=torch.uint8 if fp8 else dtype)
        scales = empty(2, kv_heads, dtype=torch.float32) if fp8 else None
        k, qkv = empty(16, kv_heads, dim, dtype=dtype), empty(16, (heads + 2 * kv_heads) * dim, dtype=dtype)
        table = empty(8192, dim, dtype=torch.float32)
        kind = f"{kv_heads} heads of {dim}, {_TYPES[dtype]}{' → e4m3' if fp8 else ''}"
        yield Case(f"write_kv: {kind}", lambda k=k, c=cache, s=scales: ops.write_kv(k, k, c, c, ids, s))  # type: ignore[misc]
        yield Case(
            f"rope_write_kv: {heads}/{kind}",
            lambda x=qkv, t=table, c=cache, s=scales: ops.rope_write_kv(x, ids, t, c, c, ids, s),  # type: ignore[misc]
        )
    for count in (4, 128, 1000):
        pool, moved = empty(32, 2, 1000, 8, 16, 128, dtype=torch.bfloat16), empty(count, dtype=torch.int64)
        yield Case(f"move_kv: {count} slots", lambda p=pool, m=moved: ops.move_kv(p, m, m))  # type: ignore[misc]


def layer_cases() -> Iterator[Case]:
    """The row operations and the exact GEMM in the demo model's and an 8B model's widths."""
    ops, ids = TritonOps(), empty(16, dtype=torch.int64)
    for hidden, inner, dtype in [(576, 1536, torch.bfloat16), (4096, 14336, torch.bfloat16), (577, 33, torch.float32)]:
        x, weight, kind = empty(16, hidden, dtype=dtype), empty(hidden, dtype=dtype), f"{hidden}, {_TYPES[dtype]}"
        up, table = empty(16, 2 * inner, dtype=dtype), empty(1000, hidden, dtype=dtype)
        yield Case(f"rms_norm: {kind}", lambda x=x, w=weight: ops.rms_norm(x, w, 1e-5))  # type: ignore[misc]
        yield Case(f"add_rms_norm: {kind}", lambda x=x, w=weight: ops.add_rms_norm(x, x, w, 1e-5))  # type: ignore[misc]
        yield Case(f"silu_mul: {inner}, {_TYPES[dtype]}", lambda u=up: ops.silu_mul(u))  # type: ignore[misc]
        yield Case(f"embed: {kind}", lambda t=table: ops.embed(ids, LinearWeight(raw=t)))  # type: ignore[misc]
    for outs, size, dtype in [
        (4096, 14336, torch.bfloat16),
        (128256, 4096, torch.bfloat16),
        (960, 576, torch.float16),
        (960, 576, torch.float32),
    ]:
        x, raw = empty(16, size, dtype=dtype), LinearWeight(raw=empty(outs, size, dtype=dtype))
        yield Case(f"linear: {outs} × {size}, {_TYPES[dtype]}", lambda x=x, w=raw: gemm.linear(x, w))  # type: ignore[misc]
    for outs in (4096, 128256):
        packed = LinearWeight(empty(outs, 4096, dtype=torch.int8), scale=empty(outs, dtype=torch.float32))
        x = empty(16, 4096, dtype=torch.bfloat16)
        yield Case(f"linear: {outs} × 4096, int8", lambda x=x, w=packed: gemm.linear(x, w))  # type: ignore[misc]
    q, table = empty(16, 32, 128, dtype=torch.bfloat16), empty(8192, 128, dtype=torch.float32)
    yield Case("rope: 32 heads of 128, bf16", lambda: ops.rope(q, ids, table))


def sampling_cases() -> Iterator[Case]:
    """Drawing over the demo model's and a 128k vocabulary."""
    ops, ids = TritonOps(), empty(16, dtype=torch.int64)
    for vocab in (49152, 128256):
        logits, wide = empty(16, vocab, dtype=torch.float32), empty(16, dtype=torch.float64)
        heat, most = empty(16, dtype=torch.float32), empty(16, dtype=torch.int32)
        drawn = (heat, most, wide, wide, ids, ids, ids)
        yield Case(f"sample: vocabulary {vocab}", lambda x=logits, d=drawn: ops.sample(x, *d))  # type: ignore[misc]
        yield Case(f"top_ids: vocabulary {vocab}", lambda x=logits: ops.top_ids(x, 8))  # type: ignore[misc]
        yield Case(f"noise: vocabulary {vocab}", lambda n=vocab: ops.noise(ids, ids, ids, 0, n))  # type: ignore[misc]


def cases() -> list[Case]:
    """Every configuration of the table."""
    return [*attention_cases(), *kv_cases(), *layer_cases(), *sampling_cases()]


def _argument(value: Any) -> tuple[str, list[list[Any]]]:
    """Triton's type of an argument, and what a launch would tell the compiler about it."""
    aligned = [["tt.divisibility", 16]]
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}", aligned
    if isinstance(value, float):
        return "fp32", []
    return "i32" if -(2**31) <= value < 2**31 else "i64", aligned if value % 16 == 0 else []


def compile_launch(made: Launch, target: int) -> Any:
    """Compile one recorded launch as a launch on the device would; returns Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = made.kernel.arg_names
    signature, constants, attributes = {}, {}, {}
    for index, (name, value) in enumerate(zip(names, made.arguments, strict=False)):
        if isinstance(value, int) and value == 1:
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name], facts = _argument(value)
        if facts:
            attributes[(index,)] = facts
    for name, value in made.constants.items():
        signature[name], constants[name] = "constexpr", value
    signature = {name: signature[name] for name in names}
    source = ASTSource(made.kernel, signature, constants, attributes)
    options = {"num_warps": made.warps, "num_stages": made.stages, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def measure(line: Line, made: Launch, target: int) -> Compiled:
    """Compile one launch and read what it needs out of the binary."""
    import triton

    kernel = compile_launch(made, target)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True)
    found = {word: int(number) for word, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout + usage.stderr)}
    return Compiled(line, target, kernel.metadata.shared, found["REG"], found["STACK"] + found["LOCAL"])


def launches(chosen: list[Case]) -> Iterator[tuple[Line, Launch]]:
    """Every launch of every case, with the line that it belongs to; a call may launch one kernel in two shapes."""
    for case in chosen:
        with launch.recording() as recorded:
            case.call()
        for made in recorded:
            yield Line(case.name, made.kernel.__name__.removesuffix("_kernel"), made.warps), made


def compiled(chosen: list[Case], targets: list[int]) -> Iterator[Compiled]:
    """Every launch of every case on every target."""
    for line, made in launches(chosen):
        for target in targets:
            yield measure(line, made, target)


def heading(targets: list[int]) -> str:
    """The head of the table, two lines."""
    heads = [f"sm_{target}: shared, registers, spilled" for target in targets]
    return f"| {' | '.join(['configuration', 'kernel', 'warps', *heads])} |\n{'|---' * (3 + len(targets))}|"


def markdown(results: list[Compiled]) -> str:
    """The table: one line per kernel and configuration, the targets side by side."""
    targets = sorted({result.target for result in results})
    grouped: dict[Line, dict[int, Compiled]] = {}
    for result in results:
        by_target = grouped.setdefault(result.line, {})
        twice = by_target.get(result.target, result)  # of two shapes the larger counts
        by_target[result.target] = max(result, twice, key=lambda r: (r.spilled, r.registers, r.shared))
    rows = [heading(targets)]
    for line, by_target in grouped.items():
        needs = [f"{r.shared:,} B, {r.registers}, {r.spilled}" for r in (by_target[target] for target in targets)]
        rows.append(f"{line} {' | '.join(needs)} |")
    return "\n".join(rows)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="compile every kernel for every target and tabulate what it needs")
    parser.add_argument("--target", type=int, nargs="+", default=[80, 90], choices=sorted(SHARED_LIMIT))
    parser.add_argument("--only", nargs="+", default=[""], help="configurations whose name contains one of these")
    parser.add_argument("--write", type=Path, help="replace the table between the marks of this Markdown file")
    arguments = parser.parse_args()
    results = []
    chosen = [case for case in cases() if any(word in case.name for word in arguments.only)]
    for result in compiled(chosen, arguments.target):
        results.append(result)
        if result.fault:
            where = f"{result.line.kernel} ({result.line.case})"
            print(f"sm_{result.target} {where} {result.fault}", file=sys.stderr, flush=True)
    table = markdown(results)
    if arguments.write:
        before, rest = arguments.write.read_text(encoding="utf-8").split(BEGIN)
        after = rest.split(END)[1]
        arguments.write.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    else:
        print(table)
    return int(any(result.fault for result in results))


if __name__ == "__main__":
    sys.exit(main())
