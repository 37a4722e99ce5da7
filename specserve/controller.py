"""How many nodes each running sequence may draft, and which of the proposed ones are worth verifying.

Pure policy: whatever it answers, the drawn tokens are the same (coupled verification); only time is at stake.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from specserve.config import SpeculationConfig
from specserve.proposal import DraftTree, StepResult
from specserve.request import Sequence
from specserve.scheduler import PlannedRows

DEFAULT_NODES = 5


def drafter_of(sequence: Sequence, config: SpeculationConfig) -> str:
    """The drafter that guesses for this sequence."""
    return sequence.request.speculation.drafter or config.drafter


def fixed_nodes(sequence: Sequence, config: SpeculationConfig) -> int | None:
    """The number of nodes that the request or the engine fixed; None = the controller's choice."""
    wanted = sequence.request.speculation.num_draft_tokens
    return config.num_draft_tokens if wanted is None else wanted


class Controller:
    """Draft budgets of an engine."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config

    def budgets(self, roots: SequenceOf[Sequence], num_prompt_rows: int) -> list[int]:
        """Node cap of each sequence's next tree; 0 = its drafter is not called."""
        return [self._budget(sequence) for sequence in roots]

    def _budget(self, sequence: Sequence) -> int:
        if drafter_of(sequence, self.config) == "off":
            return 0
        fixed = fixed_nodes(sequence, self.config)
        return DEFAULT_NODES if fixed is None else fixed

    def trim(self, plans: SequenceOf[PlannedRows], trees: SequenceOf[DraftTree]) -> list[DraftTree]:
        """The trees without the nodes that are not worth their rows."""
        return list(trees)

    def learn(self, sequence: Sequence, step: StepResult) -> None:
        """What the target made of a tree."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended."""

    def inactive_reason(self, sequence: Sequence) -> str:
        """Why a finished sequence verified no draft at all, when nothing went wrong."""
        drafter = drafter_of(sequence, self.config)
        if drafter == "off":
            return "speculation is off"
        if fixed_nodes(sequence, self.config) == 0:
            return "num_draft_tokens is 0"
        if not sequence.stats.num_steps:
            return "the answer ended with its first token"
        if not sequence.num_asked:
            return "there was never room to draft: the answer's end, pages or the token budget were too near"
        return f"drafter {drafter!r} proposed nothing"
