"""Drafters: who guesses the next tokens. `make_drafter` builds one by name; the engine knows only the protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from specserve.config import EngineConfig, SpeculationConfig
from specserve.forward import Forward
from specserve.models.decoder import DecoderConfig
from specserve.proposal import Drafter

if TYPE_CHECKING:
    from specserve_drafts.footprint import Footprint

__all__ = ["MODEL_FREE", "draft_footprint", "head_lines", "make_auto", "make_drafter"]

MODEL_FREE = ("ngram", "suffix", "recycling", "prediction")


def make_drafter(name: str, config: SpeculationConfig, forward: Forward | None) -> Drafter:
    """The drafter called `name`, for the target behind `forward`; None: there is none, as in the simulator.

    Raises ValueError where no drafter has this name, or it needs a target.
    """
    match name:
        case "ngram":
            from specserve_drafts.ngram import NgramDrafter

            return NgramDrafter(config.ngram_min, config.ngram_max)
        case "early_exit" if forward is not None:
            from specserve_drafts.early_exit import EarlyExitDrafter

            return EarlyExitDrafter(forward, config.early_exit_layers)
        case "draft_model" if forward is not None and config.draft_model is not None:
            from specserve_drafts.draft_model import load_draft_model

            return load_draft_model(config.draft_model, forward, config.draft_window)
        case "suffix":
            from specserve_drafts.suffix import SuffixDrafter

            return SuffixDrafter()
        case "recycling":
            from specserve_drafts.recycling import RecyclingDrafter
            from specserve_drafts.successors import shipped_successors

            # to read prompts, hidden states of all the engine's rows are kept: not for a drafter that few ask for
            reads_prompts = config.drafter in ("auto", "recycling")
            shipped = None if forward is None else shipped_successors(forward.decoder)
            return RecyclingDrafter(forward if reads_prompts else None, shipped)
        case "prediction":
            from specserve_drafts.prediction import PredictionDrafter

            return PredictionDrafter()
        case "eagle" if forward is not None:
            from specserve_drafts.eagle import load_eagle

            return load_eagle(config.eagle_head, forward, config.draft_window)
        case _:
            raise ValueError(f"no drafter is called {name!r}")


def make_auto(drafters: Mapping[str, Drafter], forward: Forward | None, clock: Callable[[], float]) -> Drafter:
    """The drafter that merges those of these that are worth merging: model-free ones, and an EAGLE head."""
    from specserve_drafts.auto import AutoDrafter

    parts = [drafters[name] for name in ("prediction", "suffix", "eagle", "recycling") if name in drafters]
    return AutoDrafter(parts, 1 << 31 if forward is None else forward.decoder.config.vocab_size, clock)


def head_lines(drafters: Mapping[str, Drafter], encode: Callable[[str], Sequence[int]]) -> list[str]:
    """What the self-check of a loaded EAGLE head found, and its warning if it was read wrongly.

    `encode` makes ids of a text.
    """
    if "eagle" not in drafters:
        return []
    from specserve_drafts.eagle import EagleDrafter
    from specserve_drafts.eagle_check import CHECK_TEXT

    head = drafters["eagle"]
    if not isinstance(head, EagleDrafter):
        return []
    found = head.check(encode(CHECK_TEXT))
    return [f"EAGLE head: {told}" for told in (str(found), found.warning) if told]


def draft_footprint(config: EngineConfig, target: DecoderConfig, itemsize: int, fingerprint: str) -> Footprint:
    """What drafters will take of memory: bytes for each token of the pool, and bytes once (footprint.py)."""
    from specserve_drafts import footprint

    return footprint.draft_footprint(config, target, itemsize, fingerprint)
