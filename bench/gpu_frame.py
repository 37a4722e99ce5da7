"""What the GPU bench is made of: its sizes, the device and its clock, and the lines of its table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.knobs import CompileTimes

from specserve.graphs import CudaGraphs

SEED = 1
COLUMNS = ("part", "case", "ms", "beside", "value", "unit")


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
    tokens: int  # of an answer
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
    tokens=64,
    seconds=450.0,
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
    tokens=4,
    seconds=120.0,
)


@dataclass(frozen=True)
class Line:
    """One row of the table: what was timed, and one figure of it."""

    part: str
    case: str
    ms: float | None = None
    beside: float | None = None  # ms of what it is held against
    value: float | None = None
    unit: str = ""


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
    def left(self) -> float:
        return self.size.seconds - (time.perf_counter() - self._began)

    def _compiled(self, *, times: CompileTimes, cache_hit: bool, **_: object) -> None:
        """Triton's compiler made a kernel, or found it in its cache."""
        self.compiled += 0.0 if cache_hit else 1e-6 * times.total

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """What is done inside is all compiling, Triton's part included."""
        before, began = self.compiled, time.perf_counter()
        yield
        self.compiled = before + time.perf_counter() - began

    def tell(self, line: Line) -> None:
        self.lines.append(line)
        figure = "" if line.ms is None else f" {line.ms:.3f} ms"
        beside = "" if line.beside is None else f" beside {line.beside:.3f} ms"
        value = "" if line.value is None else f" {line.value:.4g} {line.unit}"
        print(f"[{self.size.seconds - self.left:5.0f} s] {line.part}: {line.case}{figure}{beside}{value}", flush=True)

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
