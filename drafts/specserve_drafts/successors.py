"""What a target tends to say after a token, and after a pair of tokens, written down once: recycling begins with it.

The file lies beside the head that comes with specserve for the target, and like that it was made from training prompts
and the target's own answers only; it never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specserve.errors import WeightsError
from specserve.models.decoder import Decoder
from specserve_drafts.eagle import shipped_head

SUCCESSORS_FILE = "successors.safetensors"

_NONE_16 = 0xFFFF


def pair_of(previous: int, token_id: int) -> int:
    """Two tokens as one number, which no single token is; -1 is the token before all others."""
    return (previous + 1) << 32 | token_id


class Successors:
    """Ids that may follow, best first, as the target ranked them over many texts.

    Args:
        singles: integers [vocab, n]: after each token; negative where no more are known.
        pairs: integers [pairs, 2]: tokens that stand together.
        after_pairs: integers [pairs, n]: after each of the pairs.
    """

    def __init__(self, singles: Tensor, pairs: Tensor | None = None, after_pairs: Tensor | None = None) -> None:
        self._singles = singles.numpy()
        self._after_pairs = None if after_pairs is None else after_pairs.numpy()
        self._lists: dict[int, Sequence[int]] = {}  # what was asked for once, by context
        rows = [] if pairs is None else pairs.tolist()
        self._rows = {pair_of(previous, token_id): i for i, (previous, token_id) in enumerate(rows)}

    def after(self, token_id: int) -> Sequence[int]:
        """After a token; () if nothing is known."""
        known = self._lists.get(token_id)
        if known is None:
            known = _known(self._singles[token_id]) if token_id < len(self._singles) else ()
            self._lists[token_id] = known
        return known

    def after_pair(self, pair: int) -> Sequence[int]:
        """After two tokens; () if nothing is known."""
        row = self._rows.get(pair)
        if row is None or self._after_pairs is None:
            return ()
        known = self._lists.get(pair)
        if known is None:
            known = self._lists[pair] = _known(self._after_pairs[row])
        return known


def _known(ids: NDArray[np.integer]) -> Sequence[int]:
    return [i for i in ids.tolist() if i >= 0]


def shipped_successors(decoder: Decoder) -> Successors | None:
    """Those that come with specserve for this target, if any do.

    Raises:
        WeightsError: the file is not what it should be.
    """
    folder = shipped_head(decoder.fingerprint)
    path = None if folder is None else folder / SUCCESSORS_FILE
    return read_successors(path, decoder.config.vocab_size) if path is not None and path.is_file() else None


def read_successors(path: Path, vocab_size: int) -> Successors:
    """`successors` [vocab, n] and, where pairs are known, `pairs` [pairs, 2] and `pair_successors` [pairs, n].

    All are int32, or uint16 with 65535 for none.

    Raises:
        WeightsError: the file cannot be read, or is not for a vocabulary of this size.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    singles = _table(path, tensors, "successors", (vocab_size, -1), vocab_size)
    if "pairs" not in tensors:
        return Successors(singles)
    pairs = _table(path, tensors, "pairs", (-1, 2), vocab_size)
    return Successors(singles, pairs, _table(path, tensors, "pair_successors", (len(pairs), -1), vocab_size))


def _table(path: Path, tensors: dict[str, Tensor], name: str, shape: tuple[int, int], vocab_size: int) -> Tensor:
    """int32, -1 for none; -1 in `shape` is any size."""
    found = tensors.get(name)
    if found is None:
        raise WeightsError(f"{path} holds no tensor {name!r}; it has {', '.join(sorted(tensors)) or 'none'}")
    table = found.to(torch.int32)
    if found.dtype == torch.uint16:
        table[table == _NONE_16] = -1
    fits = table.dim() == 2 and all(size in (-1, got) for size, got in zip(shape, table.shape, strict=True))
    largest = int(table.max()) if table.numel() else -1
    if not fits or largest >= vocab_size:
        raise WeightsError(
            f"{path}: {name} is {tuple(table.shape)} of ids up to {largest};"
            f" wanted: {shape} of ids below {vocab_size}, where -1 is any size"
        )
    return table
