"""Drafters: who guesses the next tokens. `make_drafter` builds one by name; the engine knows only the protocol."""

from __future__ import annotations

from specserve.config import SpeculationConfig
from specserve.proposal import Drafter

__all__ = ["make_drafter"]


def make_drafter(name: str, config: SpeculationConfig) -> Drafter:
    """The drafter called `name`; raises ValueError for a name that no drafter has."""
    match name:
        case "ngram":
            from specserve_drafts.ngram import NgramDrafter

            return NgramDrafter(config.ngram_min, config.ngram_max)
        case _:
            raise ValueError(f"no drafter is called {name!r}")
