"""Fixtures that every test folder shares: tiny random Llama folders, and the demo model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import TinyLlama, write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """Folders of tiny random models, one per distinct set of options; do not write into them."""
    made: dict[str, Path] = {}

    def make(**options: Any) -> Path:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = write_tiny_llama(tmp_path_factory.mktemp("tiny_llama"), **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model, pulled and converted if this machine has not got it."""
    from specserve.models.hub import resolve_model

    return resolve_model("demo")
