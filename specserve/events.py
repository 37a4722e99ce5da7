"""What an engine tells of a request: Started, Deltas, one Finished per choice; or Failed, and then nothing more.

Records only. Counts and times are final when they are handed out; all are cut at the same token as the text.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple


class FinishReason(enum.StrEnum):
    """Why an answer ended. A failed request has no finish reason; it has an error."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class SpeculationStats:
    """What drafting did for one choice; definitions in docs/architecture.md.

    `num_steps` counts steps with a root row, `num_committed_tokens` what those steps committed. Positions are
    depths in the draft tree; a tree may draft several nodes at one depth. `steps_by_tokens[i]` counts steps that
    committed i + 1 tokens.
    """

    drafter: str = "off"
    num_steps: int = 0
    num_committed_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    inactive_reason: str | None = None
    steps_by_tokens: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per step with a root row; 1.0 is plain decoding, and the value before any step."""
        return self.num_committed_tokens / self.num_steps if self.num_steps else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one choice, computed after the cut."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds: waiting, submit to first token, per token after the first, submit to finish."""

    queue_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probabilities at one position: of the token there, of the most likely in order, of chosen ids."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    chosen_logprobs: tuple[float, ...] = ()


class Token(NamedTuple):
    """One committed token. `text` may be empty while a character or a possible stop string is held back."""

    token_id: int
    text: str
    drafted: bool
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """First event of a request, sent with its first tokens.

    `prompt_logprobs` has one entry a prompt token, None for the first; None altogether when they were not asked for.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    queue_ms: float
    seed: int
    numerics: str
    verification: str
    drafter: str
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The tokens that one step committed for one choice. `time` is in engine seconds."""

    request_id: str
    index: int
    tokens: tuple[Token, ...]
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Last event of one choice. `tail_text` is text held back so far that no stop string claimed."""

    request_id: str
    index: int
    reason: FinishReason
    tail_text: str
    usage: Usage
    speculation: SpeculationStats
    timing: Timing
    stop_match: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Last event of a request that ends with an error instead of finishes."""

    request_id: str
    error: Exception


Event = Started | Delta | Finished | Failed
