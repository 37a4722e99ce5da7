"""What a caller asks for, and the state of one answer while it is made.

`Request` and its parameters are frozen and complete when they are constructed; specserve/validation.py is the gate
that every door passes through. `Sequence` is the mutable half: one per choice, owned by the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specserve.events import SpeculationStats

if TYPE_CHECKING:
    from specserve.constraint import GrammarSpec
    from specserve.pages import PageTable

GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and where the answer ends; names and defaults as in vLLM.

    `temperature` < 1e-5 is greedy. `top_k` 0 = off. `seed` unset = 63 fresh random bits, reported back.
    `max_tokens` unset = whatever fits the model's context and the pool. `logprobs` = how many of the most
    likely tokens to report beside the drawn one (0 = the drawn one only), of the raw logits, or of the
    processed ones with `logprobs_mode="processed"`; `logprob_token_ids` are reported as well. `prompt_logprobs`
    does the same for the prompt's tokens (raw; such a request takes no prefix hit). Repetition counts prompt and
    answer, frequency and presence the answer. `bad_words` must not occur in the answer, and `grammar` is its form.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    logprobs_mode: str = "raw"
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words)
        object.__setattr__(self, "bad_words", words)
        for name in ("stop_token_ids", "logprob_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Per-request override of the engine's speculation; unset fields follow the engine.

    `num_draft_tokens` fixes the number of nodes a step. `prediction`: token ids that the answer is expected to
    contain, in order (a file to be edited, a form to be filled in).
    """

    drafter: str | None = None
    num_draft_tokens: int | None = None
    prediction: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One validated-or-about-to-be request. `request_id` is ours and unique; times are engine seconds.
    `arrival_time` is when a door took it, before tokenising; unset = when it is submitted.

    `bad_word_ids` are the token sequences of `params.bad_words`, made by the door (`Tokenizer.bad_word_ids`).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = 0
    arrival_time: float | None = None
    deadline: float | None = None
    cache_salt: str = ""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable state of one choice. `token_ids[:table.cached_len]` have KV; the rest is pending.

    `rank` orders sequences: priority first, then arrival, then choice. A preempted sequence keeps it.
    `num_asked` counts steps in which its drafter was asked. `num_siblings` choices will be forked from it when its
    prompt is done. `cached_tokens` is its first prefix hit.
    """

    request: Request
    choice: int
    seed: int
    arrival: int
    token_ids: list[int]
    table: PageTable
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    num_siblings: int = 0
    cached_tokens: int | None = None
    num_preemptions: int = 0
    num_asked: int = 0
    sequence_id: str = field(init=False)
    prompt_len: int = field(init=False)
    rank: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.sequence_id = f"{self.request.request_id}/{self.choice}"
        self.prompt_len = len(self.request.prompt_token_ids)
        self.rank = (self.request.priority, self.arrival, self.choice)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_pending(self) -> int:
        """Tokens without KV; exactly 1 (the root) while decoding."""
        return len(self.token_ids) - self.table.cached_len

    @property
    def has_token(self) -> bool:
        return self.num_output > 0

    @property
    def reports_prompt(self) -> bool:
        """Its prompt rows need logits, so none of them may come from a prefix hit."""
        return self.request.params.prompt_logprobs is not None and not self.has_token
