"""Drafters: who guesses the next tokens. `make_drafter` builds one by name; the engine knows only the protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specserve.config import SpeculationConfig
from specserve.forward import Forward
from specserve.models.decoder import DecoderConfig
from specserve.proposal import Drafter

__all__ = ["MODEL_FREE", "draft_bytes_per_token", "head_lines", "make_auto", "make_drafter"]

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


def draft_bytes_per_token(config: SpeculationConfig, target: DecoderConfig, itemsize: int, fingerprint: str) -> int:
    """What drafters add to each token of the pool, in bytes: kept rows and layers of their own.

    `itemsize` is that of a number of the KV, `fingerprint` the target's. An EAGLE head counts as three features and one
    layer like the target's.
    """
    from specserve_drafts.eagle import shipped_head

    numbers, shipped = 0, shipped_head(fingerprint)
    if config.drafter in ("auto", "recycling") and shipped is None:
        numbers += target.hidden_size
    if config.drafter == "eagle" or config.eagle_head is not None or (config.drafter == "auto" and shipped is not None):
        numbers += 3 * target.hidden_size + 2 * target.num_key_value_heads * target.head_dim
    if config.draft_model is None:
        return numbers * itemsize
    from specserve_drafts.draft_model import kv_bytes_per_token

    return numbers * itemsize + kv_bytes_per_token(config.draft_model, itemsize)
