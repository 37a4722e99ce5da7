"""The one seam between a step and CUDA graphs: work that is captured once and run many times.

What is captured reads and writes at fixed addresses and waits for nothing. Where there is no GPU the work is simply
called, so that everything around the seam runs, and is tested, on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Work = Callable[[], None]


class Graphs(Protocol):
    """Turns work into something that repeats it."""

    def capture(self, work: Work) -> Work: ...


class DirectCalls:
    """No graph: to repeat is to call again."""

    def capture(self, work: Work) -> Work:
        return work


class CudaGraphs:
    """One CUDA graph for each piece of work, all with the same memory: two of them never run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, work: Work) -> Work:
        """Run it once, so that kernels are compiled and libraries have what they allocate; then capture it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        replay: Work = graph.replay
        return replay
