"""Fixtures for the kernel tests: every backend present, both model types; and their modules on the path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from specserve_kernels import Ops

# importmode=importlib adds no folder to the path: this one holds `paged_case`
sys.path.insert(0, str(Path(__file__).parent))

from paged_case import load_or_skip


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Each backend under test; native is skipped, with its reason, where it cannot be loaded."""
    return load_or_skip(request.param)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The two model types."""
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread, unless a test asks for more: values do not need two, and a busy machine makes two wait long."""
    default = torch.get_num_threads()
    wanted: int = getattr(request, "param", 1)
    torch.set_num_threads(wanted)
    yield wanted
    torch.set_num_threads(default)
