"""The single gate that every door passes through: a request is refused here, by field, or served.

Bad input never reaches the engine's inside. Each violation names the field, what was given and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

from specserve.config import MAX_NUM_DRAFT_TOKENS, ModelLimits, nearest
from specserve.constraint import grammar_violations
from specserve.errors import ContextLengthExceeded, FieldViolation, InvalidRequest
from specserve.request import Request, SamplingParams

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LEN = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_SALT_LEN = 256
MAX_SEED = (1 << 64) - 1
MAX_BIASES = 1024
MIN_PENALTY = 0.01
MAX_PENALTY = 100.0
MAX_BIAS = 100.0
MAX_BAD_WORDS = 256
MAX_CHOSEN_IDS = 128


_INTEGERS = ("n", "top_k", "min_tokens", "seed", "max_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_OPTIONAL = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})
_ID_LISTS = ("stop_token_ids", "logprob_token_ids", "allowed_token_ids")
_TEXT_LISTS = ("stop", "bad_words")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


def _type_violations(request: Request) -> list[tuple[str, str]]:
    """Python does not check what a caller in process passes; a wrong type would fail deep inside a step."""
    params = request.params
    wrong = [name for name in _INTEGERS if not _is_int(getattr(params, name))]
    wrong += [name for name in _NUMBERS if not _is_number(getattr(params, name))]
    wrong = [name for name in wrong if not (name in _OPTIONAL and getattr(params, name) is None)]
    wrong += [name for name in _ID_LISTS if not all(map(_is_int, getattr(params, name) or ()))]
    wrong += [name for name in _TEXT_LISTS if not all(isinstance(text, str) for text in getattr(params, name))]
    if not all(_is_int(key) and _is_number(value) for key, value in (params.logit_bias or {}).items()):
        wrong.append("logit_bias")
    found = [(name, f"is {getattr(params, name)!r}, of the wrong type; see SamplingParams") for name in wrong]
    if not all(map(_is_int, request.prompt_token_ids)):
        found.append(("prompt_token_ids", "must be integers"))
    count = request.speculation.num_draft_tokens
    if count is not None and not _is_int(count):
        found.append(("speculation.num_draft_tokens", f"is {count!r}; it must be an integer"))
    if not all(map(_is_int, request.speculation.prediction)):
        found.append(("speculation.prediction", "must be token ids, which are integers"))
    return found


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
    if not MIN_PENALTY <= params.repetition_penalty <= MAX_PENALTY:
        allowed = f"allowed: {MIN_PENALTY} to {MAX_PENALTY:g} (1 = off)"
        found.append(("repetition_penalty", f"is {params.repetition_penalty}; {allowed}"))
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
    if params.logprob_token_ids and params.logprobs is None:
        found.append(("logprob_token_ids", "needs logprobs; set it to 0 to report only these and the drawn token"))
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        found.append(("allowed_token_ids", "is empty; leave it unset to allow every id"))
    for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
        found += _id_violations(name, getattr(params, name) or (), limits.vocab_size)
    outside = [i for i in params.logit_bias or {} if not 0 <= i < limits.vocab_size]
    if outside:
        found.append((f"logit_bias[{outside[0]}]", f"is no token; allowed: 0 to {limits.vocab_size - 1}"))
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
    length, most = len(request.speculation.prediction), limits.max_model_len
    if length > most:
        found.append(("speculation.prediction", f"has {length} tokens; allowed: the model's context, {most}"))
    return found + _id_violations("speculation.prediction", request.speculation.prediction, limits.vocab_size)


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
    found = _type_violations(request)
    if found:  # nothing else can be said about values of the wrong type
        raise InvalidRequest([FieldViolation(name, text) for name, text in found])
    found = _number_violations(request.params)
    found += _list_violations(request.params, limits)
    found += _speculation_violations(request, limits)
    if request.params.grammar is not None:
        found += grammar_violations(request.params.grammar)
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
