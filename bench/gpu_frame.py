"""What the GPU bench is made of: its sizes, the device and its clock, its budgets, and the lines of its table."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.knobs import CompileTimes

from specserve.graphs import CudaGraphs

SEED = 1
COLUMNS = ("part", "case", "ms", "beside", "value", "unit", "difference", "allowed", "verdict")
COMPILING = 90.0  # seconds that compilers may take, Triton's and torch's
FAILED = "FAILED"
# Largest difference, relative to the largest value, where two ways to compute the same are not alike bit for bit.
ALLOWED = {torch.bfloat16: 2**-6, torch.float32: 1e-5}


@dataclass(frozen=True)
class Size:
    """How large everything is; `seconds` is all that the command may take."""

    models: dict[str, dict[str, Any]]
    nodes: tuple[int, ...]  # rows of each sequence: the root and its nodes
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    copied: int  # bytes of the copy that bandwidth is measured with
    repeats: int
    warming: int  # calls before those that count
    caches: int  # at most so many take turns
    prompt: int  # tokens; in full size the answer crosses a split of exact attention
    tokens: int  # of an answer
    drafts: tuple[tuple[int, bool], ...]  # that guess it: how many nodes, and whether as a tree
    seconds: float


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 1 << 16,
    }


FULL = Size(
    models={
        "8b": _llama(4096, 14336, 32, 32, 8, 128256, False),
        "demo": _llama(576, 1536, 30, 9, 3, 49152, True),
    },
    nodes=(1, 4, 8, 16, 32, 64),
    batches=(1, 8, 32),
    contexts=(1024, 8192, 32768),
    copied=1 << 30,
    repeats=20,
    warming=2,
    caches=16,
    prompt=240,
    tokens=64,
    drafts=((3, False), (7, False), (7, True)),
    seconds=450.0,  # of 480: what has begun may end, and there is a start and a report
)
SMOKE = Size(
    models={"tiny": _llama(32, 64, 1, 4, 2, 64, True)},
    nodes=(1, 3),
    batches=(1,),
    contexts=(24,),
    copied=1 << 12,
    repeats=1,
    warming=0,
    caches=1,
    prompt=6,
    tokens=4,
    drafts=((3, True),),
    seconds=600.0,  # enough on any machine: what is left out is not tried
)


@dataclass(frozen=True)
class Line:
    """One row of the table: what was timed, one figure of it, and how far its result is from what it must be."""

    part: str
    case: str
    ms: float | None = None
    beside: float | None = None  # ms of what it is held against
    value: float | None = None
    unit: str = ""
    difference: float | None = None
    allowed: float | None = None
    verdict: str = ""  # "ok", FAILED and why, or why it was left out

    def checked(self, difference: float, allowed: float) -> Line:
        """With its verdict; NaN is no difference that is allowed."""
        return replace(self, difference=difference, allowed=allowed, verdict="ok" if difference <= allowed else FAILED)


def said(error: Exception) -> str:
    """An error in one short line."""
    return f"{error!r:.120}"


def relative(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    expected = wanted.cpu().float().double()
    return float((found.cpu().float().double() - expected).abs().max() / expected.abs().max())


def elements(found: Tensor, wanted: Tensor) -> float:
    """How many have other bits."""
    one, other = (tensor.contiguous().cpu().view(torch.uint8) for tensor in (found, wanted))
    return float((one != other).view(-1, found.element_size()).any(1).sum())


class Bench:
    """The device, the clock, and the lines so far."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size = size
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.lines: list[Line] = []
        self.bandwidth = 0.0  # bytes a second, read and written
        self.compiled = 0.0  # seconds in Triton's compiler, and in torch's where a stage says so
        self._began = time.perf_counter()
        knobs.compilation.listener = self._compiled
        self._random = torch.Generator(device).manual_seed(SEED)

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    @property
    def allowed(self) -> float:
        return ALLOWED[self.dtype]

    @property
    def failed(self) -> list[Line]:
        return [line for line in self.lines if line.verdict.startswith(FAILED)]

    def may_begin(self, part: str, case: str, until: float, compiling: float = 1.0) -> bool:
        """Whether less than these shares of the time and of compiling's are used; what is left out is named."""
        if self.used > until * self.size.seconds:
            budget = "time"
        elif self.compiled > compiling * COMPILING:
            budget = "compiling"
        else:
            return True
        self.tell(Line(part, case, verdict=f"left out: the budget of {budget} is used"))
        return False

    def attempt(self, part: str, case: str, until: float, work: Callable[[], None]) -> None:
        """Do it if it may begin. What stops it is told as a failed line, and the bench goes on."""
        if not self.may_begin(part, case, until):
            return
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self.tell(Line(part, case, verdict=f"{FAILED}: {said(error)}"))

    def free_bytes(self) -> float:
        """What the device has left; without one there is no end to what the smoke's shapes may take."""
        if self.device.type != "cuda":
            return float("inf")
        gc.collect()  # captured work and what it works on know each other
        torch.cuda.empty_cache()
        return float(torch.cuda.mem_get_info(self.device)[0])

    def _compiled(self, *, times: CompileTimes, cache_hit: bool, **_: object) -> None:
        """Triton's compiler made a kernel, or found it in its cache."""
        self.compiled += 0.0 if cache_hit else 1e-6 * times.total

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """What is done inside is all compiling, Triton's part included."""
        before, began = self.compiled, time.perf_counter()
        try:
            yield
        finally:
            self.compiled = before + time.perf_counter() - began

    def tell(self, line: Line) -> None:
        self.lines.append(line)
        figure = "" if line.ms is None else f" {line.ms:.3f} ms"
        beside = "" if line.beside is None else f" beside {line.beside:.3f} ms"
        value = "" if line.value is None else f" {line.value:.4g} {line.unit}"
        apart = "" if line.difference is None else f" differs by {line.difference:.3g}"
        most = "" if line.allowed is None else f" of {line.allowed:.3g} allowed"
        told = f"{line.part}: {line.case}{figure}{beside}{value}{apart}{most} {line.verdict}"
        print(f"[{self.used:5.0f} s] {told}", flush=True)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self._random, device=self.device, dtype=dtype or self.dtype)
        return drawn.mul_(scale)

    def ms(self, work: Callable[[], object]) -> float:
        """Median milliseconds of a call, from its start to the moment when the device has nothing left to do."""
        times = []
        for _ in range(self.size.warming + self.size.repeats):
            self._wait()
            began = time.perf_counter()
            work()
            self._wait()
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times[self.size.warming :])

    def device_ms(self, work: Callable[[int], object], calls: int = 1) -> float:
        """Milliseconds of a call on the device alone: a CUDA graph repeats them, so that no launch is waited for.

        `work` is given the number of the call, so that it can change what it reads.
        """

        def all_calls() -> None:
            for number in range(calls):
                work(number)

        if self.device.type != "cuda":
            return self.ms(all_calls) / calls
        return self.ms(CudaGraphs(self.device).capture(all_calls)) / calls

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def share(self, num_bytes: float, ms: float) -> float:
        """Per cent of the copy's bandwidth."""
        return 100 * num_bytes / (ms / 1e3) / self.bandwidth
