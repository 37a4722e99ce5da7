"""Logit processors: what changes the logits of a row before temperature and truncation (docs/exactness.md).

Order: bias, bans (allowed ids, bad words, min_tokens, grammar), then penalties. What depends on the prefix counts the
prompt, the answer so far and the draft tokens on the row's own path, and nothing else: a `History` follows the
committed tokens of one sequence, and a row adds its path on top without changing it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specserve.request import Request, SamplingParams

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class _Counts:
    """How often each id occurred: ids in order of appearance, and their counts, as arrays that only grow."""

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.empty(256, np.int64)
        self._counts = np.zeros(256, np.float32)

    def add(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1

    def with_path(self, path: Sequence[int]) -> tuple[Ids, Floats]:
        """(ids, counts) including the ids of `path`, read-only; what was counted stays as it is."""
        size = len(self._place)
        if not path:
            return self._ids[:size], self._counts[:size]
        counts = self._counts[:size].copy()
        new: dict[int, int] = {}
        for token_id in path:
            place = self._place.get(token_id)
            if place is None:
                new[token_id] = new.get(token_id, 0) + 1
            else:
                counts[place] += 1
        ids = np.concatenate([self._ids[:size], np.fromiter(new.keys(), np.int64, len(new))])
        return ids, np.concatenate([counts, np.fromiter(new.values(), np.float32, len(new))])


class History:
    """The committed tokens of one sequence, counted; costs O(new tokens) a step."""

    def __init__(self, request: Request, token_ids: Sequence[int]) -> None:
        """`token_ids` is the sequence's own list, prompt first; it grows as tokens are committed."""
        self._request = request
        self._token_ids = token_ids
        self._counted = 0
        self._prompt_len = len(request.prompt_token_ids)
        self._seen = _Counts()
        self._output = _Counts()
        self._allowed = np.array(request.params.allowed_token_ids or (), np.int64)
        bias = request.params.logit_bias or {}
        self._bias_ids = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)

    def process(
        self, logits: Floats, path: Sequence[int], banned: Sequence[int], mask: NDArray[np.bool_] | None
    ) -> Floats:
        """Processed logits of one row [vocab]; a copy.

        Args:
            path: draft tokens between the committed tokens and the token to draw.
            banned: ids that this position excludes.
            mask: True for the ids that the grammar allows here; None = all.
        """
        self._catch_up()
        params = self._request.params
        out = logits.copy()
        if len(self._bias_ids):
            out[self._bias_ids] += self._bias
        if len(self._allowed):
            kept = out[self._allowed]
            out.fill(-np.inf)
            out[self._allowed] = kept
        if mask is not None:
            np.copyto(out, -np.inf, where=~mask)
        out[list(banned)] = -np.inf
        out[self._bad_word_ends(path)] = -np.inf
        self._penalise(out, params, path)
        return out

    def _catch_up(self) -> None:
        for position in range(self._counted, len(self._token_ids)):
            self._seen.add(self._token_ids[position])
            if position >= self._prompt_len:
                self._output.add(self._token_ids[position])
        self._counted = len(self._token_ids)

    def _bad_word_ends(self, path: Sequence[int]) -> list[int]:
        """Last ids of bad words whose other ids are the end of the answer so far."""
        words = self._request.bad_word_ids
        if not words:
            return []
        reach = max(map(len, words)) - 1
        tail = [*self._token_ids[max(len(self._token_ids) - reach, self._prompt_len) :], *path]
        return [word[-1] for word in words if tuple(tail[len(tail) - len(word) + 1 :]) == word[:-1]]

    def _penalise(self, out: Floats, params: SamplingParams, path: Sequence[int]) -> None:
        """Repetition over prompt and answer (CTRL, Keskar et al. 2019); frequency and presence over the answer."""
        if params.repetition_penalty != 1.0:
            ids, _ = self._seen.with_path(path)
            values, penalty = out[ids], np.float32(params.repetition_penalty)
            out[ids] = np.where(values > 0, values / penalty, values * penalty)
        if params.frequency_penalty or params.presence_penalty:
            ids, counts = self._output.with_path(path)
            out[ids] -= np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty)


def needs_history(request: Request) -> bool:
    """Whether a request's logits are processed by more than the bans of a position."""
    params = request.params
    return bool(
        params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or params.logit_bias
        or params.allowed_token_ids
        or request.bad_word_ids
    )
