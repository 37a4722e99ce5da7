"""One tiny model for all exactness tests, in one environment a run.

SPECSERVE_TEST_KERNELS names the backend and SPECSERVE_TEST_THREADS the number of threads (by default one: contention
costs more than it gives); `make exactness` goes through them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness import sharpen


@pytest.fixture(scope="session")
def sharp_llama(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose answers repeat enough that an n-gram guess is sometimes right."""
    return sharpen(tiny_llama(tied=False, hidden=64), tmp_path_factory.mktemp("sharp") / "llama")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("SPECSERVE_TEST_THREADS", "1")))
    yield
    torch.set_num_threads(before)
