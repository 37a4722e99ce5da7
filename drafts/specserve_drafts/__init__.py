"""Drafters: who guesses the next tokens. `make_drafter` builds one by name; the engine knows only the protocol."""

from __future__ import annotations

from specserve.config import SpeculationConfig
from specserve.forward import Forward
from specserve.proposal import Drafter

__all__ = ["MODEL_FREE", "make_drafter"]

MODEL_FREE = ("ngram", "suffix", "recycling", "prediction")


def make_drafter(name: str, config: SpeculationConfig, forward: Forward | None) -> Drafter:
    """The drafter called `name`, for the target behind `forward` (None: there is none, as in the simulator).

    Raises:
        ValueError: no drafter has this name, or it needs a target.
    """
    match name:
        case "ngram":
            from specserve_drafts.ngram import NgramDrafter

            return NgramDrafter(config.ngram_min, config.ngram_max)
        case _:
            raise ValueError(f"no drafter is called {name!r}")
