"""What a model drafter may ask of the target: its weights, its KV, and what was kept of every committed row.

A drafter shares the target's paged pool: one page id names a slice of every layer group, its own included, and of the
kept rows. So drafts fork, hit prefixes, and are evicted together with the target's KV, and a drafter that paused finds
everything it missed. The runner implements this; it never learns what a drafter does with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from specserve_kernels import Ops
from torch import Tensor

from specserve.kept import KeptRows
from specserve.models.decoder import Decoder


class Forward(Protocol):
    """The target as drafters see it. Slots are pool-wide: page * page_size + offset.

    `folder` is where the target was loaded from, its tokenizer with it; None: it comes from no folder.
    """

    decoder: Decoder
    folder: Path | None
    ops: Ops
    kept: KeptRows
    kv: Tensor  # [layers, 2, pages, kv_heads, page_size, head_dim]; drafters may write uncommitted slots only

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    def add_group(self, kv: Tensor) -> None:
        """Register a drafter's own layers, [layers, 2, at least num_pages, kv_heads, page_size, head_dim].

        Copy-on-write copies carry them; compaction does not: committed slots are the drafter's to fill.
        """
        ...
