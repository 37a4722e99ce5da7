"""sample.py against the oracle's sampler on made-up logits: same noise in, same token out, always.

The engine's noise op is replaced here by the oracle's noise, so that equality is exact; the op itself is compared
with published vectors elsewhere, and once below through `draw_tokens`. Only where the oracle says that a truncation
edge is hit to the last bits of a sum may ids differ.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from typing import Any

import numpy as np
import oracle
import pytest
import torch

from specserve.logprobs import token_logprobs
from specserve.request import SamplingParams
from specserve.sample import Draw, draw_tokens, survivors

ROUNDING = 1e-9  # two ways to sum the same probabilities


class OracleNoise:
    """The one op that the sampler uses, computed by the oracle."""

    name = "oracle"
    sample = None

    def noise(
        self, seed: torch.Tensor, draw_index: torch.Tensor, choice: torch.Tensor, purpose: int, vocab_size: int
    ) -> torch.Tensor:
        rows = [
            oracle.gumbel(s % (1 << 64), i, c, vocab_size, purpose)
            for s, i, c in zip(seed.tolist(), draw_index.tolist(), choice.tolist(), strict=True)
        ]
        return torch.from_numpy(np.stack(rows))


OPS: Any = OracleNoise()
NEVER = -np.inf

LOGITS = {
    "normal": lambda rng, vocab: rng.normal(0, 3, vocab),
    "peaked": lambda rng, vocab: rng.normal(0, 30, vocab),
    "ties": lambda rng, vocab: np.round(rng.normal(0, 1, vocab)),
    "equal": lambda rng, vocab: np.full(vocab, 1.25),
    "adjacent": lambda rng, vocab: np.float32(3.0) + rng.integers(0, 4, vocab) * np.float32(2.4e-7),
    "huge": lambda rng, vocab: rng.normal(0, 1, vocab) * 1e30,
    "banned": lambda rng, vocab: np.where(rng.permutation(vocab) < 0.4 * vocab, NEVER, rng.normal(0, 2, vocab)),
    "one_left": lambda rng, vocab: np.where(np.arange(vocab) == vocab // 2, -7.0, NEVER),
    "zeros": lambda rng, vocab: np.where(rng.random(vocab) < 0.5, 0.0, -0.0),
}
VOCABS = [3, 17, 1000, 50_257]


def logits_of(kind: str, vocab: int, seed: int) -> oracle.Array:
    return LOGITS[kind](np.random.default_rng(seed), vocab).astype(np.float32)


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.0, 1e-6, 1e-4, 0.3, 0.8, 1.0, 2.5, 100.0])),
        top_k=int(rng.choice([0, 0, 1, 2, 5, vocab - 1, vocab, vocab + 7])),
        top_p=float(rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-6])),
        min_p=float(rng.choice([0.0, 0.0, 1e-4, 0.05, 0.5, 1.0])),
    )


def expect(logits: oracle.Array, draw: Draw) -> tuple[int, float]:
    params = draw.params
    allowed = logits.copy()
    allowed[list(draw.banned)] = NEVER
    noise = oracle.gumbel(draw.seed, draw.draw_index, draw.choice, len(logits))
    return oracle.draw(allowed, noise, params.temperature, params.top_k, params.top_p, params.min_p)


def assert_same(logits: oracle.Array, draws: list[Draw]) -> None:
    """One row of logits, several draws."""
    drawn = draw_tokens(torch.from_numpy(logits)[None], draws, OPS)
    for token, draw in zip(drawn, draws, strict=True):
        expected, margin = expect(logits, draw)
        assert token == expected or margin < ROUNDING, f"{draw}: {token} is not {expected}, margin {margin}"


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", LOGITS)
def test_every_parameter_draws_the_oracles_token(kind: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for round_ in range(30 if vocab < 5000 else 6):
        params = random_params(rng, vocab)
        if kind == "huge" and params.temperature == 1e-4:
            continue  # logits / T leaves fp32
        seed = int(rng.integers(0, 1 << 63)) * 2 + 1
        banned = tuple(int(i) for i in rng.choice(vocab, 2, replace=False)) if round_ % 3 == 0 and vocab > 3 else ()
        if kind == "one_left" and vocab // 2 in banned:
            banned = ()
        draws = [
            Draw(row=0, draw_index=index, choice=choice, seed=seed, params=params, banned=banned)
            for index, choice in ((0, 0), (1, 0), (70_000, 3))
        ]
        assert_same(logits_of(kind, vocab, round_), draws)


def test_sampler_without_truncation_has_no_excuse() -> None:
    """No edge exists, so ids are equal with no margin asked."""
    logits = logits_of("normal", 500, 1)
    params = SamplingParams(temperature=1.3)
    draws = [Draw(row=0, draw_index=i, choice=0, seed=9, params=params) for i in range(200)]
    drawn = draw_tokens(torch.from_numpy(logits)[None], draws, OPS)
    assert drawn == [expect(logits, draw)[0] for draw in draws]
    assert len(set(drawn)) > 10


@pytest.mark.parametrize("kind", ["ties", "equal", "zeros", "normal"])
@pytest.mark.parametrize("top_k", [1, 2, 3, 7, 16, 17, 18])
def test_top_k_keeps_exactly_k_lowest_ids_first(kind: str, top_k: int) -> None:
    logits = logits_of(kind, 17, 4)
    ids, _ = survivors(logits, SamplingParams(top_k=top_k))
    kept = sorted(range(17) if ids is None else ids.tolist())
    best_first = sorted(range(17), key=lambda i: (-logits[i], i))
    assert kept == sorted(best_first[:top_k])


@pytest.mark.parametrize(
    ("top_p", "count"), [(0.2500001, 2), (0.25, 1), (0.2499999, 1), (0.5, 2), (0.75, 3), (0.76, 4)]
)
def test_top_p_keeps_the_shortest_prefix_that_reaches_it(top_p: float, count: int) -> None:
    """Four equal ids: the mass of a prefix is exact, so p on the edge is exact too."""
    ids, _ = survivors(np.zeros(4, dtype=np.float32), SamplingParams(top_p=top_p))
    assert ids is not None
    assert sorted(ids.tolist()) == list(range(count))


def test_top_p_keeps_one_id_however_small() -> None:
    ids, _ = survivors(logits_of("equal", 1000, 0), SamplingParams(top_p=1e-9))
    assert ids is not None
    assert ids.tolist() == [0]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.97, 0.9999])
def test_top_p_of_a_flat_law_looks_past_any_shortlist(top_p: float) -> None:
    logits = logits_of("normal", 50_257, 2) * np.float32(0.01)
    ids, scaled = survivors(logits, SamplingParams(top_p=top_p))
    kept, _ = oracle.truncate(logits, scaled, 0, top_p, 0.0)
    assert ids is not None
    assert abs(len(ids) - int(kept.sum())) <= 1  # one id may fall either way in the last bits
    assert kept[np.sort(ids)[: len(ids) - 1]].all() or len(ids) < 2


def test_top_p_sees_only_what_top_k_left() -> None:
    """Probabilities .4 .3 .2 .1: after top-k 2 they are 4/7 and 3/7, so p = .57 keeps one, and .58 two."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    for top_p, expected in ((0.57, [0]), (0.58, [0, 1]), (0.99, [0, 1])):
        ids, _ = survivors(logits, SamplingParams(top_k=2, top_p=top_p))
        assert ids is not None
        assert sorted(ids.tolist()) == expected


def test_min_p_compares_with_the_largest_left() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.2, 0.05])).astype(np.float32)
    for min_p, expected in ((0.09, [0, 1, 2, 3]), (0.11, [0, 1, 2]), (0.41, [0, 1]), (0.51, [0]), (1.0, [0])):
        ids, _ = survivors(logits, SamplingParams(min_p=min_p))
        assert sorted(range(4) if ids is None else ids.tolist()) == expected


def test_truncation_happens_after_temperature() -> None:
    """p = .8 keeps one id at T = 0.1 and all three at T = 10."""
    logits = np.array([2.0, 1.0, 0.5], dtype=np.float32)
    cold, _ = survivors(logits, SamplingParams(temperature=0.1, top_p=0.8))
    hot, _ = survivors(logits, SamplingParams(temperature=10.0, top_p=0.8))
    assert cold is not None and cold.tolist() == [0]
    assert hot is not None and sorted(hot.tolist()) == [0, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_ignores_truncation_noise_and_choice(temperature: float) -> None:
    logits = np.array([1.0, 5.0, 5.0, 4.9], dtype=np.float32)
    params = SamplingParams(temperature=temperature, top_k=3, top_p=0.1, min_p=0.9)
    draws = [Draw(row=0, draw_index=i, choice=i % 3, seed=i, params=params) for i in range(9)]
    assert draw_tokens(torch.from_numpy(logits)[None], draws, OPS) == [1] * 9


def test_ties_of_the_score_go_to_the_lowest_id() -> None:
    class Flat:
        sample = None

        def noise(self, *args: Any) -> torch.Tensor:
            return torch.zeros(1, args[-1])

    flat: Any = Flat()
    for params in (SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.7)):
        draw = Draw(row=0, draw_index=0, choice=0, seed=1, params=params)
        assert draw_tokens(torch.tensor([[0.0, 2.0, 2.0, 2.0]]), [draw], flat) == [1]


def test_banned_ids_are_never_drawn_and_the_row_is_left_alone() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0], [9.0, 1.0, 0.0]])
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.5),
    ):
        draws = [Draw(row=0, draw_index=i, choice=0, seed=3, params=params, banned=(0,)) for i in range(30)]
        assert 0 not in draw_tokens(logits, draws, OPS)
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("vocab", [17, 5000])
def test_a_row_does_not_see_its_batch(vocab: int) -> None:
    """Alone, among others, and at every index: the same token, and the same bits of its scores."""
    rng = np.random.default_rng(vocab)
    rows = np.stack([logits_of(kind, vocab, 3) for kind in LOGITS])
    draws = [
        Draw(row=row, draw_index=row + 5, choice=row % 2, seed=17 + row, params=random_params(rng, vocab))
        for row in range(len(rows))
        if list(LOGITS)[row] != "huge"
    ]
    together = draw_tokens(torch.from_numpy(rows), draws, OPS)
    backwards = draw_tokens(torch.from_numpy(rows), draws[::-1], OPS)[::-1]
    alone = []
    for draw in draws:
        single = Draw(0, draw.draw_index, draw.choice, draw.seed, draw.params)
        alone += draw_tokens(torch.from_numpy(rows[draw.row : draw.row + 1].copy()), [single], OPS)
        _, scores = survivors(rows[draw.row], SamplingParams(temperature=0.7))
        _, again = survivors(rows[draw.row].copy(), SamplingParams(temperature=0.7))
        assert scores.tobytes() == again.tobytes()
    assert together == backwards == alone


def test_choices_of_one_row_differ_and_match_their_own_draws() -> None:
    logits = logits_of("normal", 1000, 8)
    params = SamplingParams(temperature=2.0)
    draws = [Draw(row=0, draw_index=20, choice=choice, seed=5, params=params) for choice in range(8)]
    drawn = draw_tokens(torch.from_numpy(logits)[None], draws, OPS)
    assert drawn == [expect(logits, draw)[0] for draw in draws]
    assert len(set(drawn)) > 4


def test_drawn_law_is_the_softmax() -> None:
    """6000 independent draw indices on 4 ids: every count within 4.5 standard deviations."""
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    logits = torch.from_numpy(np.log(probs).astype(np.float32))[None]
    num_draws = 6000
    draws = [Draw(row=0, draw_index=i, choice=0, seed=11, params=SamplingParams()) for i in range(num_draws)]
    counts = Counter(draw_tokens(logits, draws, OPS))
    for token, prob in enumerate(probs):
        sigma = np.sqrt(num_draws * prob * (1 - prob))
        assert abs(counts[token] - num_draws * prob) < 4.5 * sigma


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_the_oracles(mode: str, temperature: float, count: int) -> None:
    for kind, (top_k, top_p) in itertools.product(("normal", "ties", "banned"), ((0, 1.0), (4, 0.9))):
        logits = logits_of(kind, 300, 6)
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, logprobs=count, logprobs_mode=mode)
        draw = Draw(row=0, draw_index=3, choice=0, seed=2, params=params, banned=(7, 8))
        (token,) = draw_tokens(torch.from_numpy(logits)[None], [draw], OPS)
        allowed = logits.copy()
        allowed[[7, 8]] = NEVER
        base = logits if mode == "raw" else oracle.processed(allowed, temperature, top_k, top_p, 0.0)
        expected = oracle.report(base, token, count)
        got = token_logprobs(torch.from_numpy(logits)[None], draw, token)
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-6)
        assert got.top_ids == expected.top_ids
        assert got.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-6)


def test_logprobs_list_ids_in_order_however_close() -> None:
    """Far from the top fp32 logprobs of different logits coincide; the order is still that of the logits."""
    logits = np.full(8, -1e6, dtype=np.float32)
    logits[[2, 5, 1]] = np.float32([0.5, 2e-7, 1e-7])
    logits[7] = 40.0
    params = SamplingParams(logprobs=4)
    draw = Draw(row=0, draw_index=0, choice=0, seed=0, params=params)
    assert token_logprobs(torch.from_numpy(logits)[None], draw, 7).top_ids == (7, 2, 5, 1)


def test_oracle_philox_matches_the_published_vectors() -> None:
    """Random123's kat_vectors of philox4x32-10."""
    ones = 0xFFFFFFFF
    vectors = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones, ones), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, words in vectors:
        assert tuple(oracle.philox4x32(np.array([counter], dtype=np.uint64), key)[0].tolist()) == words


def test_oracle_margin_shrinks_at_an_edge_and_only_there() -> None:
    flat = np.zeros(4, dtype=np.float32)
    logits = np.array([3.0, 2.9999, 0.0, -1.0], dtype=np.float32)
    assert oracle.draw(logits, flat, 0.0, 0, 1.0, 0.0)[1] == pytest.approx(1e-4, rel=0.01)
    # the second of the top is dropped by a hair, and would win with its noise
    noise = np.array([0.0, 5.0, 0.0, 0.0], dtype=np.float32)
    assert oracle.draw(logits, noise, 1.0, 1, 1.0, 0.0) == (0, pytest.approx(1e-4, rel=0.01))
    # far below it nothing matters
    assert oracle.draw(logits, flat, 1.0, 3, 1.0, 0.0)[1] == pytest.approx(1e-4, rel=0.01)
    assert oracle.draw(np.array([9.0, 0.0, -1.0], np.float32), flat[:3], 1.0, 1, 1.0, 0.0)[1] == pytest.approx(9.0)


def test_oracle_sampler_is_short_and_alone() -> None:
    lines = inspect.getsource(oracle).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("# ---- the sampler"))
    end = next(i for i, line in enumerate(lines) if line.startswith("# ---- end"))
    assert end - start - 1 <= 80
    assert not any(line.strip().startswith(("import specserve", "from specserve")) for line in lines)
