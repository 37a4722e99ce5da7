"""What is kept of every row beside its K and V, for drafters: its last hidden state, and features of some layers.

One row a slot of the pool, so kept rows are shared, moved and wiped with the pages that they belong to, and a page's
content is determined by its key. Nothing is kept until a drafter asks for it, while the engine is built.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KeptRows:
    """Tensors [slots, width]; untouched memory costs nothing until a slot is written."""

    def __init__(
        self, num_pages: int, page_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self.feature_layers: tuple[int, ...] = ()
        self._pages = (num_pages, page_size)
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._hidden: Tensor | None = None
        self._features: Tensor | None = None

    def keep(self, *, hidden: bool = False, feature_layers: Sequence[int] = ()) -> None:
        """From now on keep last hidden states, and the residual stream after these layers (0-based, ascending).

        Raises:
            ValueError: features of other layers are kept already.
        """
        num_slots = self._pages[0] * self._pages[1]
        if hidden and self._hidden is None:
            self._hidden = torch.empty(num_slots, self._hidden_size, dtype=self._dtype, device=self._device)
        if feature_layers:
            wanted = tuple(feature_layers)
            if self.feature_layers not in ((), wanted):
                raise ValueError(f"features of layers {self.feature_layers} are kept already, not of {wanted}")
            self.feature_layers = wanted
            width = len(wanted) * self._hidden_size
            self._features = torch.empty(num_slots, width, dtype=self._dtype, device=self._device)

    def write(self, slots: Tensor, hidden: Tensor, features: Tensor) -> None:
        """Rows of one step: `hidden` [rows, hidden_size], `features` [layers, rows, hidden_size]."""
        if self._hidden is not None:
            self._hidden[slots] = hidden
        if self._features is not None:
            self._features[slots] = features.transpose(0, 1).flatten(1)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots; all sources are read before any target is written."""
        for kept in self._all():
            kept[target] = kept[source]

    def zero(self, pages: list[int]) -> None:
        """Wipe the slots of these pages."""
        for kept in self._all():
            kept.view(*self._pages, -1)[pages] = 0

    def hidden(self, slots: Tensor) -> Tensor:
        """Hidden states after the final norm, [n, hidden_size], of slots int64 [n]; ValueError if they are not kept."""
        if self._hidden is None:
            raise ValueError("no hidden states are kept; ask for them when the drafter is made")
        return self._hidden[slots]

    def features(self, slots: Tensor) -> Tensor:
        """[n, layers * hidden_size], layers side by side; ValueError if they are not kept."""
        if self._features is None:
            raise ValueError("no features are kept; ask for them when the drafter is made")
        return self._features[slots]

    def _all(self) -> list[Tensor]:
        return [kept for kept in (self._hidden, self._features) if kept is not None]
