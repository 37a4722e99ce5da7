"""Is a head read as it was trained? Its guesses over a text are held against the target's own.

A head with one option misread still runs, and silently loses half of its acceptance or all of it. So one forward of the
target over some text, and two of the head (from true features, and one step on from its own outputs), say how often
their best tokens agree; the options that files get wrong are tried the other way round as well. Nothing is changed by
what is found: it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from specserve_kernels import AttentionRows
from torch import Tensor

from specserve.models.decoder import Decoder
from specserve_drafts.eagle_head import EagleHead

CHECK_TEXT = (
    "Photosynthesis is the process by which green plants turn sunlight into chemical energy. Light is absorbed by a"
    " pigment called chlorophyll, which is found in the leaves. The energy is used to split water into hydrogen and"
    " oxygen. The oxygen is released into the air, and the hydrogen is combined with carbon dioxide to make sugar.\n\n"
    "There are three things that a plant needs for this:\n\n1. Sunlight\n2. Water\n3. Carbon dioxide\n\nFor example, if"
    " a tree makes 5 grams of sugar in one hour, it makes 5 x 8 = 40 grams of sugar in 8 hours. To find out how much"
    " it makes in a week, we multiply the number of grams in a day by the number of days in a week: 40 x 7 = 280."
    " Therefore, the tree makes 280 grams of sugar in a week. I hope this helps! Let me know if you have any questions."
)
"""About 200 tokens, in the style of answers. Any text of the target's language does."""

LEAST_AGREEMENT = 0.10
# how much better another reading must agree before it is named
CLEARLY_MORE, CLEARLY_BETTER = 1.3, 0.04
_PAGE_SIZE = 16


class Agreement(NamedTuple):
    """Share of positions where the head's best token is the target's: from true features, and one step on."""

    first: float
    second: float


@dataclass(frozen=True, slots=True)
class HeadCheck:
    """`coverage`: share of the target's best tokens that the draft vocabulary holds, the most that `first` can be.

    `better`: another reading of the configuration under which the head agrees clearly more often, "" if none does.
    """

    num_positions: int
    agreement: Agreement
    coverage: float
    better: str = ""

    @property
    def warning(self) -> str | None:
        """What is likely wrong, None if nothing is."""
        if self.better:
            return f"the head seems to be misread: {self.better}"
        if self.agreement.first < LEAST_AGREEMENT:
            return (
                f"the head agrees with its target at only {self.agreement.first:.0%} of {self.num_positions} positions;"
                " likely causes: it was trained for another target or for another version of it, eagle_config names"
                " other layers than it was trained with, or rope_theta, norm_before_residual or d2t are not its own"
            )
        return None

    def __str__(self) -> str:
        first, second = self.agreement
        return (
            f"agrees with its target at {first:.0%} of {self.num_positions} positions, one step on at {second:.0%};"
            f" its vocabulary covers {self.coverage:.0%}"
        )


@torch.inference_mode()
def check_head(head: EagleHead, target: Decoder, ids: Sequence[int]) -> HeadCheck:
    """Run target and head over `ids` (3 or more, within the target's context), in memory of their own."""
    text = torch.tensor(ids).to(target.device)
    features, best = _read(head, target, text)
    found = _agreement(head, text, features, best)
    covered = 1.0 if head.target_ids is None else float(torch.isin(best[1:], head.target_ids).float().mean())
    better = [
        f"with {name} it would agree at {other.first:.0%} instead of {found.first:.0%} of positions, one step on at"
        f" {other.second:.0%} instead of {found.second:.0%}"
        for name, variant in _variants(head)
        if _is_better(other := _agreement(variant, text, features, best), found)
    ]
    return HeadCheck(len(text) - 1, found, covered, "; ".join(better))


def _variants(head: EagleHead) -> list[tuple[str, EagleHead]]:
    """The same head with one option read the other way."""
    config = head.config
    if config.family == "EAGLE-1/2":
        return []
    residual, output = not config.norm_before_residual, not config.feeds_back_norm
    return [
        (f"norm_before_residual = {residual!s}".lower(), head.variant(norm_before_residual=residual)),
        (f"norm_output = {output!s}".lower(), head.variant(feeds_back_norm=output)),
    ]


def _is_better(other: Agreement, found: Agreement) -> bool:
    """In one of the two, and in the other one not worse."""
    pairs = list(zip(other, found, strict=True))
    clearly = [a > b * CLEARLY_MORE and a > b + CLEARLY_BETTER for a, b in pairs]
    return any(clearly) and all(a >= b for a, b in pairs)


def _read(head: EagleHead, target: Decoder, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the head reads of each token, and the token that the target would draw after it at temperature 0."""
    count, device = len(ids), ids.device
    positions = torch.arange(count, device=device)
    kv_shape = target.config.kv_shape(-(-count // _PAGE_SIZE), _PAGE_SIZE)
    kv = torch.empty(kv_shape, dtype=target.dtype, device=device)
    rows, layers = _causal(count, count, device), head.config.feature_layers
    hidden, features = target.run(ids, positions, positions, rows, kv, feature_layers=layers)
    read = features.transpose(0, 1).flatten(1) if layers else hidden
    return read, target.logits(hidden).argmax(dim=1)


def _agreement(head: EagleHead, ids: Tensor, features: Tensor, best: Tensor) -> Agreement:
    """Row i pairs token i + 1 with the features of token i, and is held against what the target draws after it."""
    count, device = len(ids) - 1, ids.device
    kv = torch.empty(head.kv_shape(-(-2 * count // _PAGE_SIZE), _PAGE_SIZE), dtype=head.dtype, device=device)
    slots = torch.arange(count, device=device)
    rows = _causal(count, 2 * count, device)
    outputs = head.forward(ids[1:], head.fuse(features[:-1]), slots + 1, slots, rows, kv)
    first = _guesses(head, outputs) == best[1:]
    # one step on: row i goes on with token i + 2, sees rows 0 … i and itself
    steps = slots[: count - 1]
    rows = _causal(count - 1, 2 * count, device, own=count)
    outputs = head.forward(ids[2:], head.feedback(outputs[:-1]), steps + 2, steps + count, rows, kv)
    second = _guesses(head, outputs) == best[2:]
    return Agreement(float(first.float().mean()), float(second.float().mean()))


def _guesses(head: EagleHead, outputs: Tensor) -> Tensor:
    ids = head.logits(outputs).argmax(dim=1)
    return ids if head.target_ids is None else head.target_ids[ids]


def _causal(count: int, num_slots: int, device: torch.device, own: int | None = None) -> AttentionRows:
    """Row i sees slots 0 … i; `own`: and then slot own + i, its own."""
    int32: Any = {"dtype": torch.int32, "device": device}
    tails = torch.empty(count, 0, **int32) if own is None else torch.arange(own, own + count, **int32)[:, None]
    return AttentionRows(
        sequence=torch.zeros(count, **int32),
        prefix_len=torch.arange(1, count + 1, **int32),
        tail_slots=tails,
        tail_len=torch.full((count,), tails.shape[1], **int32),
        page_table=torch.arange(-(-num_slots // _PAGE_SIZE), **int32)[None],
    )
