"""The text of one answer while its ids arrive: whole characters are released once no stop string can claim them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from specserve.request import SamplingParams


class TextDecoder(Protocol):
    """Incremental decoding: pushes and the flush concatenate to the decoded whole."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextSource(Protocol):
    """What the engine needs of a tokenizer."""

    def incremental(self) -> TextDecoder: ...


class AnswerText:
    """Text of one choice: decodes, looks for stop strings, holds back what may become one."""

    def __init__(self, decoder: TextDecoder, params: SamplingParams) -> None:
        self._decoder = decoder
        self._stops = params.stop
        self._include = params.include_stop_str_in_output
        self.searches = bool(params.stop)
        self._held = ""

    def push(self, token_id: int, may_stop: bool) -> tuple[str, str | None]:
        """Text to release now, and the stop string that this token completed, if any.

        `may_stop` is False while min_tokens is not reached: text of such tokens cannot be part of a match.
        """
        text = self._held + self._decoder.push(token_id)
        self._held = ""
        if not may_stop:
            return text, None
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda item: item[0])
            return text[: at + len(stop)] if self._include else text[:at], stop
        keep = self._possible_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def push_all(self, token_ids: SequenceOf[int]) -> tuple[str, ...]:
        """Text that each token releases, where no text can stop the answer (`searches` is False)."""
        return tuple(map(self._decoder.push, token_ids))

    def flush(self) -> str:
        """What is still held, at the end of an answer that no stop string ended."""
        text, self._held = self._held + self._decoder.flush(), ""
        return text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        longest = min(max(map(len, self._stops)) - 1, len(text))
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[len(text) - size :]) for stop in self._stops):
                return size
        return 0
