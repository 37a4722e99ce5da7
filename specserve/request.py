"""What a caller asks for, and the state of one answer while it is made.

`Request` and its parameters are frozen and complete when they are constructed; `validate` is the single gate
that every door passes through. `Sequence` is the mutable half: one per choice, owned by the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specserve.config import MAX_NUM_DRAFT_TOKENS, ModelLimits, nearest
from specserve.errors import ContextLengthExceeded, FieldViolation, InvalidRequest
from specserve.events import SpeculationStats

if TYPE_CHECKING:
    from specserve.pages import PageTable

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LEN = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_SALT_LEN = 256
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 256
MAX_CHOSEN_IDS = 128
GREEDY_TEMPERATURE = 1e-5
MAX_SEED = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and where the answer ends; names and defaults as in vLLM.

    `temperature` < 1e-5 is greedy. `top_k` 0 = off. `seed` unset = 63 fresh random bits, reported back.
    `max_tokens` unset = whatever fits the model's context and the pool. `logprobs` = how many of the most
    likely tokens to report beside the drawn one (0 = the drawn one only), of the raw logits, or of the
    processed ones with `logprobs_mode="processed"`; `logprob_token_ids` are reported as well. `prompt_logprobs`
    does the same for the prompt's tokens (raw; such a request takes no prefix hit). Repetition counts prompt and
    answer, frequency and presence the answer. `bad_words` must not occur in the answer.
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

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "logprob_token_ids", "bad_words"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Per-request override of the engine's speculation; unset fields follow the engine."""

    drafter: str | None = None
    num_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One validated-or-about-to-be request. `request_id` is ours and unique; times are engine seconds.

    `bad_word_ids` are the token sequences of `params.bad_words`, made by the door (`Tokenizer.bad_word_ids`).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = 0
    arrival_time: float = 0.0
    deadline: float | None = None
    cache_salt: str = ""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


def _number_violations(params: SamplingParams) -> list[tuple[str, str]]:
    """Fields whose own value is out of range, as (field, description)."""

    def bad(value: float, low: float, high: float) -> bool:
        return not (math.isfinite(value) and low <= value <= high)

    found = []
    if bad(params.temperature, 0.0, 100.0):
        found.append(("temperature", f"is {params.temperature}; allowed: 0 (greedy) to 100"))
    if bad(params.top_p, 0.0, 1.0) or params.top_p == 0.0:
        found.append(("top_p", f"is {params.top_p}; allowed: more than 0, up to 1 (off)"))
    if params.top_k < 0:
        found.append(("top_k", f"is {params.top_k}; allowed: 0 (off) or more"))
    if bad(params.min_p, 0.0, 1.0):
        found.append(("min_p", f"is {params.min_p}; allowed: 0 (off) to 1"))
    if params.seed is not None and not 0 <= params.seed <= MAX_SEED:
        found.append(("seed", f"is {params.seed}; allowed: 0 to 2^64 - 1"))
    if params.max_tokens is not None and params.max_tokens < 1:
        found.append(("max_tokens", f"is {params.max_tokens}; allowed: 1 or more"))
    if params.min_tokens < 0:
        found.append(("min_tokens", f"is {params.min_tokens}; allowed: 0 or more"))
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        found.append(("min_tokens", f"is {params.min_tokens}, more than max_tokens {params.max_tokens}"))
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        found.append(("logprobs", f"is {params.logprobs}; allowed: 0 to {MAX_LOGPROBS}"))
    if params.prompt_logprobs is not None and not 0 <= params.prompt_logprobs <= MAX_LOGPROBS:
        found.append(("prompt_logprobs", f"is {params.prompt_logprobs}; allowed: 0 to {MAX_LOGPROBS}"))
    if params.logprobs_mode not in ("raw", "processed"):
        found.append(("logprobs_mode", f"is {params.logprobs_mode!r}; allowed: 'raw', 'processed'"))
    return found + _penalty_violations(params)


def _penalty_violations(params: SamplingParams) -> list[tuple[str, str]]:
    found = []
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0):
        found.append(("repetition_penalty", f"is {params.repetition_penalty}; allowed: more than 0 (1 = off)"))
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not -2.0 <= value <= 2.0:
            found.append((name, f"is {value}; allowed: -2 to 2 (0 = off)"))
    for token_id, bias in (params.logit_bias or {}).items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            found.append((f"logit_bias[{token_id}]", f"is {bias}; allowed: -{MAX_BIAS:g} to {MAX_BIAS:g}"))
    return found


def _list_violations(params: SamplingParams, limits: ModelLimits) -> list[tuple[str, str]]:
    found = []
    if not 1 <= params.n <= limits.max_num_seqs:
        found.append(("n", f"is {params.n}; allowed: 1 to max_num_seqs = {limits.max_num_seqs}"))
    if len(params.stop) > MAX_STOP_STRINGS:
        found.append(("stop", f"has {len(params.stop)} strings; allowed: at most {MAX_STOP_STRINGS}"))
    if any(not text or len(text) > MAX_STOP_STRING_LEN for text in params.stop):
        found.append(("stop", f"strings must have 1 to {MAX_STOP_STRING_LEN} characters"))
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        found.append(("stop_token_ids", f"has {len(params.stop_token_ids)} ids; allowed: at most {MAX_STOP_TOKEN_IDS}"))
    for name, most in (("logit_bias", MAX_BIASES), ("bad_words", MAX_BAD_WORDS), ("logprob_token_ids", MAX_CHOSEN_IDS)):
        count = len(getattr(params, name) or ())
        if count > most:
            found.append((name, f"has {count} entries; allowed: at most {most}"))
    if any(not word or len(word) > MAX_STOP_STRING_LEN for word in params.bad_words):
        found.append(("bad_words", f"must have 1 to {MAX_STOP_STRING_LEN} characters each"))
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        found.append(("allowed_token_ids", "is empty; leave it unset to allow every id"))
    for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "logit_bias"):
        found += _id_violations(name, list(getattr(params, name) or ()), limits.vocab_size)
    return found


def _id_violations(name: str, ids: SequenceOf[int], vocab_size: int) -> list[tuple[str, str]]:
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            return [(f"{name}[{index}]", f"is {token_id}; allowed: 0 to {vocab_size - 1}")]
    return []


def _speculation_violations(request: Request, limits: ModelLimits) -> list[tuple[str, str]]:
    found = []
    drafter, count = request.speculation.drafter, request.speculation.num_draft_tokens
    if drafter is not None and drafter not in limits.drafters:
        found.append(("speculation.drafter", f"is {drafter!r}. {nearest(drafter, limits.drafters)}"))
    if count is not None and not 0 <= count <= MAX_NUM_DRAFT_TOKENS:
        found.append(("speculation.num_draft_tokens", f"is {count}; allowed: 0 to {MAX_NUM_DRAFT_TOKENS}"))
    return found


def _check_length(request: Request, limits: ModelLimits) -> None:
    """The last token drawn needs no slot of its own, so a context of L holds a prompt of at most L - 1."""
    prompt_len = len(request.prompt_token_ids)
    capacity, what = limits.max_model_len, "the model's context"
    if limits.pool_tokens < capacity:
        capacity, what = limits.pool_tokens, "the whole KV pool"
    wanted = prompt_len + (request.params.max_tokens or 1)
    if wanted <= capacity:
        return
    asked = f"{prompt_len} prompt tokens"
    if request.params.max_tokens is not None:
        asked += f" + max_tokens {request.params.max_tokens} = {wanted}"
    else:
        asked += " and at least one answer token"
    raise ContextLengthExceeded(
        [FieldViolation("prompt", f"{asked} do not fit {what} of {capacity} tokens; shorten it or lower max_tokens")],
        metadata={"limit": str(capacity), "got": str(wanted)},
    )


def validate(request: Request, limits: ModelLimits) -> None:
    """Refuse a request that cannot be served as written; the one gate that every door shares.

    Raises:
        InvalidRequest: with one violation per bad field.
        ContextLengthExceeded: the prompt can never fit; the message and metadata hold both numbers.
    """
    found = _number_violations(request.params)
    found += _list_violations(request.params, limits)
    found += _speculation_violations(request, limits)
    if not request.prompt_token_ids:
        found.append(("prompt", "is empty; give at least one token"))
    found += _id_violations("prompt_token_ids", request.prompt_token_ids, limits.vocab_size)
    if len(request.cache_salt) > MAX_SALT_LEN:
        found.append(("cache_salt", f"has {len(request.cache_salt)} characters; allowed: {MAX_SALT_LEN}"))
    if not -(1 << 31) <= request.priority < 1 << 31:
        found.append(("priority", f"is {request.priority}; allowed: 32-bit integers"))
    if found:
        raise InvalidRequest([FieldViolation(name, text) for name, text in found])
    _check_length(request, limits)


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable state of one choice. `token_ids[:table.cached_len]` have KV; the rest is pending.

    `rank` orders sequences: priority first, then arrival, then choice. A preempted sequence keeps it.
    `num_siblings` choices will be forked from it when its prompt is done. `cached_tokens` is its first prefix hit.
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

    @property
    def sequence_id(self) -> str:
        return f"{self.request.request_id}/{self.choice}"

    @property
    def rank(self) -> tuple[int, int, int]:
        return (self.request.priority, self.arrival, self.choice)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

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
