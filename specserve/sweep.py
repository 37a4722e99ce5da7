"""What steps cost on this machine: a short run of the real engine at start-up, in at most two seconds.

The engine is a throw-away one over the product's runner, so that a step's seconds hold everything from its plan to its
events, the Python of it too. It answers made-up prompts with drafts of a given size, most of them wrong; pages that it
wrote are free afterwards. Noise only ever adds time, so each figure is the least of a few, taken in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from specserve.config import EngineConfig, ModelLimits, SpeculationConfig
from specserve.controller import Controller
from specserve.costs import StepCosts, monotone
from specserve.engine import Engine
from specserve.events import Delta, Failed
from specserve.proposal import Drafter, DraftRow, DraftTree, StepResult
from specserve.request import Request, SamplingParams, SpeculationParams

Steps = Callable[[SpeculationConfig, ModelLimits, dict[str, Drafter], Controller], Engine]

MAX_SECONDS = 1.6  # of taking turns; building up the contexts comes on top
ROWS = (1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 49, 64)
SHORT, LONG = 16, 512  # tokens of context
SEQUENCES = 16
NAME = "sweep"


class _Chains:
    """Chains of so many nodes as were ordered: of `right` tokens first, as far as they go, then of wrong ones."""

    name = NAME
    wants_top_ids = False

    def __init__(self) -> None:
        self.num_nodes = 0
        self.right: Sequence[int] = ()

    def start(self, view: DraftRow) -> None: ...

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        return [self._chain(row, min(self.num_nodes, cap)) for row, cap in zip(rows, caps, strict=True)]

    def _chain(self, row: DraftRow, num_nodes: int) -> DraftTree:
        right = self.right[len(row.token_ids) - row.prompt_len :][:num_nodes]
        return DraftTree.chain([*right, *range(1, 1 + num_nodes - len(right))], NAME)

    def observe(self, view: DraftRow, result: StepResult) -> None: ...

    def stop(self, view: DraftRow) -> None: ...
