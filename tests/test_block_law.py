"""Block verification keeps the target's law: proven by enumeration, and four known-wrong variants do not.

For chains of three drafts over a vocabulary of three: all 27 drafts, all lengths, all residual tokens are summed with
their probabilities, and the rest of the answer is completed by the target. The result must be the target's own law
over three tokens to 1e-12 for random and for extreme models.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from specserve.block import block_acceptance, block_length, block_residual, block_weights

VOCAB, GAMMA = 3, 3
Model = dict[tuple[int, ...], NDArray[np.float64]]
Law = dict[tuple[int, ...], float]


def model(rng: np.random.Generator, sharpness: float) -> Model:
    prefixes = [p for n in range(GAMMA + 1) for p in itertools.product(range(VOCAB), repeat=n)]
    return {prefix: rng.dirichlet(np.full(VOCAB, sharpness)) for prefix in prefixes}


def sequence_law(target: Model, length: int) -> Law:
    law = {}
    for tokens in itertools.product(range(VOCAB), repeat=length):
        law[tokens] = float(np.prod([target[tokens[:i]][token] for i, token in enumerate(tokens)]))
    return law


def rows(model_: Model, tokens: tuple[int, ...], count: int) -> NDArray[np.float64]:
    return np.array([model_[tokens[:i]] for i in range(count)]).reshape(count, VOCAB)


def stop_law(acceptance: NDArray[np.float64]) -> NDArray[np.float64]:
    """P(length = i) of `block_length`: i succeeds and everything after it fails."""
    fails_after = np.concatenate([np.cumprod((1 - acceptance)[::-1])[::-1][1:], [1.0]])
    return acceptance * fails_after


def first_failure_law(acceptance: NDArray[np.float64]) -> NDArray[np.float64]:
    """A planted error: stop at the first failed position."""
    alive = np.concatenate([[1.0], np.cumprod(acceptance[1:])])
    return alive * np.concatenate([1 - acceptance[1:], [1.0]])


def plain_residual(position: int, weights: object, target: NDArray[np.float64], draft: NDArray[np.float64]) -> object:
    """A planted error: p - q instead of b·p - q."""
    return block_residual(position, np.ones(len(draft) + 1), target, draft)


def same_uniform(q: NDArray[np.float64], drafted: int, residual: NDArray[np.float64]) -> NDArray[np.float64]:
    """A planted error: the residual is drawn by inverse CDF with the uniform that drew the draft."""
    low, high = np.cumsum(q)[drafted] - q[drafted], np.cumsum(q)[drafted]
    ends = np.cumsum(residual)
    return np.maximum(np.minimum(high, ends) - np.maximum(low, ends - residual), 0.0) / q[drafted]


def output_law(
    target: Model,
    draft: Model,
    lengths: Callable[[NDArray[np.float64]], NDArray[np.float64]] = stop_law,
    residual: Callable[..., object] = block_residual,
    keep: Callable[[tuple[int, ...]], int] = len,
    shared_noise: bool = False,
) -> tuple[Law, float]:
    """Law of the first GAMMA tokens of a step completed by the target, and the expected number of tokens a step."""
    law = dict.fromkeys(itertools.product(range(VOCAB), repeat=GAMMA), 0.0)
    tokens_per_step = 0.0
    for drafted in itertools.product(range(VOCAB), repeat=GAMMA):
        chance = float(np.prod([draft[drafted[:i]][token] for i, token in enumerate(drafted)]))
        if chance == 0.0:
            continue
        kept = drafted[: keep(drafted)]
        p, q = rows(target, kept, len(kept) + 1), rows(draft, kept, len(kept))
        weights = block_weights(kept, p, q)
        for length, stop in enumerate(lengths(block_acceptance(weights, p, q))):
            after = np.asarray(residual(length, weights, p, q))
            if shared_noise and length < len(kept):
                after = same_uniform(q[length], kept[length], after)
            for token, mass in enumerate(after):
                tokens_per_step += chance * stop * mass * (length + 1)
                _complete(law, target, (*kept[:length], token), chance * stop * mass)
    return law, tokens_per_step


def _complete(law: Law, target: Model, tokens: tuple[int, ...], mass: float) -> None:
    if mass == 0.0:
        return
    if len(tokens) >= GAMMA:
        law[tokens[:GAMMA]] += mass
        return
    for token, p in enumerate(target[tokens]):
        _complete(law, target, (*tokens, token), mass * p)


def distance(a: Law, b: Law) -> float:
    return max(abs(a[key] - b[key]) for key in a)


MODELS = [(seed, sharpness) for seed in range(12) for sharpness in (0.3, 1.0, 5.0)]


@pytest.mark.parametrize(("seed", "sharpness"), MODELS)
def test_the_law_is_the_targets(seed: int, sharpness: float) -> None:
    rng = np.random.default_rng(seed)
    target, draft = model(rng, sharpness), model(rng, sharpness)
    law, _ = output_law(target, draft)
    assert distance(law, sequence_law(target, GAMMA)) < 1e-12


def test_equal_models_keep_the_whole_block() -> None:
    target = model(np.random.default_rng(5), 1.0)
    law, tokens = output_law(target, target)
    assert distance(law, sequence_law(target, GAMMA)) < 1e-12
    assert tokens == pytest.approx(GAMMA + 1)


def test_ids_that_the_target_excludes_are_never_kept() -> None:
    target, draft = model(np.random.default_rng(6), 1.0), model(np.random.default_rng(7), 1.0)
    for prefix in target:
        target[prefix] = np.array([0.0, 0.25, 0.75])
        draft[prefix] = np.array([0.5, 0.5, 0.0])
    law, _ = output_law(target, draft)
    assert distance(law, sequence_law(target, GAMMA)) < 1e-12


def test_the_papers_example() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 accepted by the token rule, 11/9 by block verification."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    expected = 0.0
    for drafted in itertools.product(range(2), repeat=2):
        weights = block_weights(drafted, np.stack([p] * 3), np.stack([q] * 2))
        lengths = stop_law(block_acceptance(weights, np.stack([p] * 3), np.stack([q] * 2)))
        expected += q[drafted[0]] * q[drafted[1]] * float(lengths @ np.arange(3))
    assert expected == pytest.approx(11 / 9)
    token_rule = sum(np.minimum(p, q)) * (1 + sum(np.minimum(p, q)))
    assert token_rule == pytest.approx(10 / 9)


@pytest.mark.parametrize(
    "mutant",
    [
        {"residual": plain_residual},
        {"lengths": first_failure_law},
        {"shared_noise": True},
        {"keep": lambda drafted: 3 if drafted[0] == 0 else 0},
    ],
    ids=["residual p - q", "first failure", "shared noise", "length that looks at the token"],
)
def test_planted_errors_are_caught(mutant: dict[str, object]) -> None:
    caught = 0
    for seed, sharpness in MODELS:
        rng = np.random.default_rng(seed)
        target, draft = model(rng, sharpness), model(rng, sharpness)
        law, _ = output_law(target, draft, **mutant)  # type: ignore[arg-type]
        caught += distance(law, sequence_law(target, GAMMA)) > 1e-4
    assert caught >= len(MODELS) // 2


def test_the_gain_over_the_token_rule() -> None:
    """Reported by the enumeration: never fewer tokens a step than the token rule, on average over models some more."""
    gains = []
    for seed, sharpness in MODELS:
        rng = np.random.default_rng(seed)
        target, draft = model(rng, sharpness), model(rng, sharpness)
        _, block = output_law(target, draft)
        token, reach = 1.0, {(): 1.0}
        for _ in range(GAMMA):
            reach = {
                (*prefix, v): mass * min(target[prefix][v], draft[prefix][v])
                for prefix, mass in reach.items()
                for v in range(VOCAB)
            }
            token += sum(reach.values())
        assert block >= token - 1e-12
        gains.append(block / token - 1)
    print(f"block verification: {100 * np.mean(gains):.1f} % more tokens a step than the token rule")
    assert np.mean(gains) > 0.005


def test_a_later_success_rescues_earlier_failures() -> None:
    assert block_length(np.array([1.0, 0.1, 0.9]), [0.5, 0.5, 0.5]) == 2
    assert block_length(np.array([1.0, 0.1, 0.2]), [0.5, 0.5, 0.5]) == 0
