"""specserve: low-latency LLM serving with speculative decoding as the first citizen.

Names are imported on first use (PEP 562), so that importing a pure module loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specserve.config import EngineConfig, SpeculationConfig
    from specserve.constraint import GrammarSpec
    from specserve.errors import SpecserveError
    from specserve.llm import LLM, CompletionOutput, RequestOutput
    from specserve.request import SamplingParams, SpeculationParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "GrammarSpec",
    "RequestOutput",
    "SamplingParams",
    "SpecserveError",
    "SpeculationConfig",
    "SpeculationParams",
]

_HOME = {
    "LLM": "llm",
    "CompletionOutput": "llm",
    "RequestOutput": "llm",
    "EngineConfig": "config",
    "GrammarSpec": "constraint",
    "SpeculationConfig": "config",
    "SpecserveError": "errors",
    "SamplingParams": "request",
    "SpeculationParams": "request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specserve' has no attribute {name!r}")
    return getattr(import_module(f"specserve.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
