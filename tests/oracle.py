"""What the engine must say, written a second time without it.

Nothing of specserve is imported here: transformers recomputes the logits of every prefix from scratch (no cache,
fp32), and the sampler below is DESIGN 2 in plain numpy. Beside each token stands its *margin*: how far any number
that decides the draw would have to move before another token came out. A test excuses a difference only where the
margin is tiny. What the parameters ask of a row's logits is done in this order: bias, bans (allowed ids, ending ids
below min_tokens, last ids of bad words), penalties (repetition over prompt and answer, then frequency and presence
over the answer), ÷ T, top-k, top-p, min-p. `logprobs` are log softmax of the raw logits, or with
`logprobs_mode="processed"` of what the draw sees without its noise, -inf for dropped ids.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
GREEDY_BELOW = 1e-5


# ---- the sampler of DESIGN 2 (at most 80 lines, counted by test_sampler.py) -------------------------------------
def philox4x32(counter: Array, key: tuple[int, int]) -> Array:
    """Philox4x32-10 (Salmon et al., SC'11): counters uint [n, 4], one key of two 32-bit words → words [n, 4]."""
    mask, m0, m1 = np.uint64(0xFFFFFFFF), np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
    x0, x1, x2, x3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        product0, product1 = m0 * x0, m1 * x2  # 32 × 32 bits fit 64
        x0, x1, x2, x3 = (
            (product1 >> np.uint64(32)) ^ x1 ^ np.uint64(k0),
            product1 & mask,
            (product0 >> np.uint64(32)) ^ x3 ^ np.uint64(k1),
            product0 & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([x0, x1, x2, x3], axis=1)


def gumbel(seed: int, draw_index: int, choice: int, vocab_size: int, purpose: int = 0) -> Array:
    """G of every id, fp32 [vocab_size]."""
    blocks = np.arange((vocab_size + 3) // 4)
    counter = np.stack([blocks, *(np.full_like(blocks, word) for word in (draw_index, choice, purpose))], axis=1)
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:vocab_size]
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log(uniform))).astype(np.float32)


def truncate(logits: Array, scaled: Array, top_k: int, top_p: float, min_p: float) -> tuple[Array, Array]:
    """Which ids survive (bool [vocab]), and how far each is from changing sides (fp64 [vocab], +inf: never).

    The distance is in scores for top-k and in probability for top-p and min-p, whichever filter is nearest.
    """
    order = np.lexsort((np.arange(len(logits)), -logits))  # logit descending, id ascending
    order = order[np.isfinite(logits[order])]  # a banned id never survives
    distance = np.full(len(logits), np.inf)
    if 0 < top_k < len(order):
        kept, dropped = order[:top_k], order[top_k:]
        distance[kept] = scaled[kept] - scaled[dropped[0]]
        distance[dropped] = scaled[kept[-1]] - scaled[dropped]
        order = kept
    if top_p < 1.0:
        weights = np.exp(scaled[order].astype(np.float64) - scaled[order[0]])
        mass_before = np.concatenate([[0.0], np.cumsum(weights)[:-1]]) / weights.sum()
        keep = mass_before < top_p
        distance[order[1:]] = np.minimum(distance[order[1:]], np.abs(mass_before[1:] - top_p))
        order = order[keep]
    if min_p > 0.0:
        weights = np.exp(scaled[order].astype(np.float64) - scaled[order[0]])  # p_i / p_max
        keep = weights >= min_p
        distance[order[1:]] = np.minimum(distance[order[1:]], np.abs(weights[1:] - min_p) / weights.sum())
        order = order[keep]
    survives = np.zeros(len(logits), dtype=bool)
    survives[order] = True
    return survives, distance


def draw(logits: Array, noise: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[int, float]:
    """The token of DESIGN 2 and its margin; `logits` fp32 [vocab] after the bans. T is taken as fp32."""
    if temperature < GREEDY_BELOW:
        token = int(np.argmax(logits))
        return token, float(np.min(logits[token] - np.delete(logits, token), initial=np.inf))
    scaled = logits / np.float32(temperature)
    survives, distance = truncate(logits, scaled, top_k, top_p, min_p)
    scores = scaled + noise  # fp32: one rounding
    token = int(np.argmax(np.where(survives, scores, -np.inf)))  # argmax: the lowest id of equals
    # Another id wins when its score rises above the winner's and, if it was dropped, its filter lets it in.
    needed = np.maximum(scores[token] - scores, 0.0)
    needed = np.where(survives, needed, np.maximum(needed, distance))
    needed[~np.isfinite(logits)] = np.inf
    needed[token] = distance[token]
    return token, float(needed.min())


# ---- end of the sampler -----------------------------------------------------------------------------------------


def log_softmax(logits: Array) -> Array:
    """fp64 log softmax; -inf stays -inf."""
    shifted = logits.astype(np.float64) - np.max(logits)
    with np.errstate(divide="ignore"):
        return shifted - np.log(np.exp(shifted).sum())  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class OracleParams:
    """What a request may ask, by the names of the product's parameters; meaning in the opening paragraph."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = 0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    logprobs_mode: str = "raw"
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def process(
    raw: Array, prompt: Sequence[int], answer: Sequence[int], params: OracleParams, banned: Iterable[int] = ()
) -> Array:
    """Logits of the token after prompt + answer, up to but without ÷ T; `banned` are the ids that end bad words, …"""
    logits = raw.copy()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    if params.allowed_token_ids is not None:
        logits[np.isin(np.arange(len(raw)), list(params.allowed_token_ids), invert=True)] = -np.inf
    logits[list(banned)] = -np.inf
    for token in {*prompt, *answer}:
        penalty = np.float32(params.repetition_penalty)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(answer).items():
        logits[token] -= np.float32(params.frequency_penalty) * np.float32(count) + np.float32(params.presence_penalty)
    return logits


def bad_ends(prefix: Sequence[int], words: Sequence[Sequence[int]]) -> set[int]:
    """Ids that would complete one of `words` (token sequences) after `prefix`."""
    return {word[-1] for word in words if list(word[:-1]) == list(prefix[len(prefix) - len(word) + 1 :])}


@dataclass(frozen=True)
class OracleLogprobs:
    """At one position: of the id there, of the most likely ones (lowest id first among equals), of chosen ones."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    chosen_logprobs: tuple[float, ...] = ()


@dataclass
class OracleOutput:
    """One answer; `margins[i]` belongs to `token_ids[i]`. `prompt_logprobs` has None for the first token."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    text: str | None = None
    margins: list[float] = field(default_factory=list)
    logprobs: list[OracleLogprobs] = field(default_factory=list)
    prompt_logprobs: list[OracleLogprobs | None] | None = None


def first_stop(text: str, stop: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Where the leftmost stop string at or after `start` begins, and which; the first listed of equals."""
    found = [(at, place, item) for place, item in enumerate(stop) if (at := text.find(item, start)) >= 0]
    return (min(found)[0], min(found)[2]) if found else None


class Oracle:
    """transformers without a cache. `model` is a folder, a Hugging Face model, or a function ids → logits [vocab]."""

    def __init__(self, model: Any) -> None:
        if isinstance(model, str) or hasattr(model, "__fspath__"):
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model = model.eval().float() if isinstance(model, torch.nn.Module) else model
        self._known: dict[tuple[int, ...], Array] = {}

    def logits(self, token_ids: Sequence[int]) -> Array:
        """fp32 [vocab] after the whole prefix, from scratch; the same prefix is computed once."""
        key = tuple(token_ids)
        if key not in self._known:
            self._known[key] = self._compute(key, 1)[-1]
        return self._known[key]

    def foresee(self, token_ids: Sequence[int]) -> None:
        """Compute all prefixes in one forward, because they are likely to be asked. Changes no answer, only time."""
        key = tuple(token_ids)
        if key not in self._known and isinstance(self._model, torch.nn.Module):
            for end, row in enumerate(self._compute(key, len(key)), 1):
                self._known.setdefault(key[:end], row)

    def _compute(self, token_ids: tuple[int, ...], count: int) -> Array:
        """Logits after each of the last `count` prefixes, [count, vocab]."""
        if not isinstance(self._model, torch.nn.Module):
            return np.asarray(self._model(token_ids), dtype=np.float32)[None]
        with torch.inference_mode():
            output = self._model(torch.tensor([token_ids]), use_cache=False, logits_to_keep=count)
        return output.logits[0].float().numpy()  # type: ignore[no-any-return]

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        choice: int = 0,
        eos_token_ids: Sequence[int] = (),
        bad_word_ids: Sequence[Sequence[int]] = (),
        decode: Callable[[list[int]], str] | None = None,
        **params: Any,
    ) -> OracleOutput:
        """One choice of one request; `params` are OracleParams. `decode` is needed for `stop` and `text`.

        An ending id is part of `token_ids`. With a stop string the ids go up to the token that completes it and
        the text ends before it. No ending of any kind counts before `min_tokens` tokens are there.
        """
        asked = OracleParams(**params)
        assert asked.seed is not None and asked.max_tokens is not None
        ending = {*asked.stop_token_ids, *(() if asked.ignore_eos else eos_token_ids)}
        out = OracleOutput(prompt_logprobs=self._prompt_logprobs(prompt_ids, asked))
        ids = list(prompt_ids)
        while len(out.token_ids) < asked.max_tokens:
            raw = self.logits(ids)
            banned = bad_ends(out.token_ids, bad_word_ids)
            banned |= ending if len(out.token_ids) < asked.min_tokens else set()
            logits = process(raw, prompt_ids, out.token_ids, asked, banned)
            noise = np.zeros_like(raw) if asked.greedy else gumbel(asked.seed, len(ids), choice, len(raw))
            token, margin = draw(logits, noise, asked.temperature, asked.top_k, asked.top_p, asked.min_p)
            ids.append(token)
            out.token_ids.append(token)
            out.margins.append(margin)
            if asked.logprobs is not None:
                seen = raw if asked.logprobs_mode == "raw" else seen_by_draw(logits, asked)
                out.logprobs.append(report(seen, token, asked.logprobs, asked.logprob_token_ids))
            if self._ended(out, ending, asked, decode):
                out.finish_reason = "stop"
                break
        return out

    def _prompt_logprobs(self, prompt: Sequence[int], asked: OracleParams) -> list[OracleLogprobs | None] | None:
        if asked.prompt_logprobs is None:
            return None
        self.foresee(prompt)
        rows = [report(self.logits(prompt[:i]), prompt[i], asked.prompt_logprobs) for i in range(1, len(prompt))]
        return [None, *rows]

    @staticmethod
    def _ended(
        out: OracleOutput, ending: set[int], asked: OracleParams, decode: Callable[[list[int]], str] | None
    ) -> bool:
        if decode is not None:
            out.text = decode(out.token_ids)
        if len(out.token_ids) < asked.min_tokens:
            return False
        if decode is not None and out.text is not None:
            # text of tokens before min_tokens is no part of a match; half a character counts as the next token's
            start = len(decode(out.token_ids[: max(asked.min_tokens - 1, 0)]).rstrip("\ufffd"))
            match = first_stop(out.text, asked.stop, start)
            if match is not None:
                out.text = out.text[: match[0] + (len(match[1]) if asked.include_stop_str_in_output else 0)]
                return True
        return out.token_ids[-1] in ending


def processed(allowed: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> Array:
    """The logits that the draw sees without its noise: ÷ T, dropped ids at -inf."""
    if temperature < GREEDY_BELOW:
        return allowed
    scaled = allowed / np.float32(temperature)
    survives, _ = truncate(allowed, scaled, top_k, top_p, min_p)
    return np.where(survives, scaled, -np.inf)


def seen_by_draw(logits: Array, params: OracleParams) -> Array:
    """`processed` by a request's parameters."""
    return processed(logits, params.temperature, params.top_k, params.top_p, params.min_p)


def report(logits: Array, token: int, count: int, chosen: Sequence[int] = ()) -> OracleLogprobs:
    """Logprobs of the id there, of the `count` most likely and of the `chosen`."""
    values = log_softmax(logits)
    top = np.lexsort((np.arange(len(values)), -values))[:count]
    return OracleLogprobs(
        float(values[token]),
        tuple(top.tolist()),
        tuple(values[top].tolist()),
        tuple(values[list(chosen)].tolist()),
    )


def first_difference(ids: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs (or is missing on one side); None when they are equal."""
    for index, (left, right) in enumerate(zip(ids, reference, strict=False)):
        if left != right:
            return index
    return None if len(ids) == len(reference) else min(len(ids), len(reference))


@dataclass
class NearTies:
    """Counts sequences that differ from the oracle at a near-tie; more than 1 % of them is a failure."""

    tolerance: float = 1e-3
    allowed: float = 0.01
    num_sequences: int = 0
    excused: list[str] = field(default_factory=list)

    def compare(self, ids: Sequence[int], oracle: OracleOutput, what: str) -> bool:
        """True when equal; False when the first difference is excused.

        Raises:
            AssertionError: the ids differ where the oracle was sure.
        """
        self.num_sequences += 1
        at = first_difference(ids, oracle.token_ids)
        if at is None:
            return True
        margin = oracle.margins[at] if at < len(oracle.margins) else math.inf
        assert margin < self.tolerance, (
            f"{what}: token {at} of {list(ids)} differs from {oracle.token_ids}, and the oracle's margin is {margin}"
        )
        self.excused.append(f"{what}: token {at}, margin {margin:.2e}")
        return False

    def finish(self) -> None:
        """Raises AssertionError when near-ties are too common to be chance."""
        assert len(self.excused) <= self.allowed * self.num_sequences, (
            f"{len(self.excused)} of {self.num_sequences} sequences differ at near-ties:\n" + "\n".join(self.excused)
        )
