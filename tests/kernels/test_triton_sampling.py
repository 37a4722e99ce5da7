"""Drawing in Triton: Philox's integers, G within 2 ulp, and the same ids as scoring every survivor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton_case  # noqa: F401  (chooses the interpreter)
from specserve_kernels import load
from specserve_kernels.triton import launch, sampling
from specserve_kernels.triton.compile_table import empty
from test_native import LOGITS, expected_token, sampling_case
from test_noise import KEYS, VECTORS, expected_noise, int64
from torch import Tensor
from triton_case import EXACT
from triton_words import words_kernel

NOISE = load("torch").noise


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of some hundred ids in several blocks."""
    monkeypatch.setattr(sampling, "SAMPLE_BLOCK", 256)
    monkeypatch.setattr(sampling, "TOP_BLOCK", 256)


def test_published_vectors() -> None:
    for (block, index, choice, purpose), (low, high), words in VECTORS:
        out = torch.empty(4, dtype=torch.int64)
        counter, key = int64([block]), int64([low | high << 32])
        words_kernel[(1,)](key, int64([index]), int64([choice]), out, purpose, counter)
        assert tuple(out.tolist()) == words


@pytest.mark.parametrize(("purpose", "vocab_size"), [(0, 1), (1, 5), (0, 1001)])
def test_noise_is_within_two_ulp_of_fp64(purpose: int, vocab_size: int, small_chunks: None) -> None:
    seeds, draws, choices = (int64(list(column)) for column in zip(*KEYS, strict=True))
    got = EXACT.noise(seeds, draws, choices, purpose, vocab_size).numpy()
    expected = np.stack([expected_noise(*key, purpose, vocab_size) for key in KEYS])
    assert got.dtype == np.float32
    assert (np.abs(got - expected) <= 2 * np.spacing(np.abs(expected).astype(np.float32))).all()


@pytest.mark.parametrize("vocab_size", [49_152, 128_256])
def test_one_launch_for_all_rows(vocab_size: int) -> None:
    logits, wide, keys = empty(3, vocab_size, dtype=torch.float32), empty(3, dtype=torch.float64), int64([1, 2, 3])
    with launch.recording() as drawing:
        EXACT.sample(logits, torch.ones(3), torch.ones(3, dtype=torch.int32), wide, wide, keys, keys, keys)
    with launch.recording() as ranking:
        EXACT.top_ids(logits, 8)
    assert [[made.grid for made in made_by] for made_by in (drawing, ranking)] == [[(3,)], [(3,)]]


def expected_ids(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *key: Tensor
) -> list[int]:
    noise = NOISE(key[0], key[1], key[2], 0, logits.shape[1]).numpy()
    parameters = zip(*(column.tolist() for column in (temperature, top_k, top_p, min_p)), strict=True)
    return [expected_token(logits[i].numpy(), noise[i], *row) for i, row in enumerate(parameters)]


def check(kind: str, vocab_size: int, rows: int) -> None:
    case = sampling_case(kind, vocab_size, rows)
    assert EXACT.sample(*case).tolist() == expected_ids(*case)


@pytest.mark.parametrize("kind", LOGITS)
def test_sample_is_the_argmax_over_all_survivors(kind: str, small_chunks: None) -> None:
    check(kind, 600, 4)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [3, 17, 1000])
@pytest.mark.parametrize("kind", LOGITS)
def test_sample_in_many_sizes(kind: str, vocab_size: int, small_chunks: None) -> None:
    check(kind, vocab_size, 20)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "peaked", "ties", "coarse", "banned"])
def test_sample_over_a_large_vocabulary(kind: str) -> None:
    check(kind, 128_256, 6)


@pytest.mark.parametrize("vocab_size", [5, 255, 256, 257, 512])
def test_sample_where_chunks_begin_and_end(vocab_size: int, small_chunks: None) -> None:
    check("ties", vocab_size, 4)


SETTINGS = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 3, 1.0, 0.0), (2.0, 0, 0.9, 0.0), (1.0, 2, 0.9, 0.1)]


def with_settings(logits: Tensor) -> tuple[Tensor, ...]:
    """`sample`'s arguments: one row of logits under each of SETTINGS, with noise of its own."""
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*SETTINGS, strict=True))
    keys = torch.arange(len(SETTINGS))
    return (
        logits.repeat(len(SETTINGS), 1), torch.tensor(temperature), torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float64), torch.tensor(min_p, dtype=torch.float64), keys, keys + 5, keys % 2,
    )  # fmt: skip


@pytest.mark.parametrize("winner", [0, 255, 256, 599], ids=str)
@pytest.mark.parametrize("others", [0.0, -torch.inf], ids=str)
def test_one_id_beyond_reach_wins_in_any_chunk(winner: int, others: float, small_chunks: None) -> None:
    """Also where nothing survives in the chunks before it, or in those after."""
    logits = torch.full((600,), others)
    logits[winner] = 90.0
    assert EXACT.sample(*with_settings(logits)).tolist() == [winner] * len(SETTINGS)


def test_of_equal_scores_in_several_chunks_the_lowest_id_is_drawn(small_chunks: None) -> None:
    logits = torch.full((700,), -torch.inf)
    logits[[130, 386, 387, 650]] = 1e30  # no noise changes it; two are of one lane
    case = with_settings(logits)
    assert EXACT.sample(*case).tolist() == [130] * len(SETTINGS) == expected_ids(*case)


def test_scores_that_fp32_logarithms_cannot_tell_apart(small_chunks: None) -> None:
    """Logits that make up for the noise: every id of every chunk is a candidate, and the last bits decide."""
    key = int64([3])
    noise = NOISE(key, key, key, 0, 300)
    one, off = torch.ones(1), torch.zeros(1, dtype=torch.float64)
    case = (0.1 - noise, one, torch.zeros(1, dtype=torch.int32), one.double(), off, key, key, key)
    assert len((case[0] + noise).unique()) > 1
    assert EXACT.sample(*case).tolist() == expected_ids(*case)


def test_a_row_does_not_depend_on_its_neighbours(small_chunks: None) -> None:
    case = sampling_case("ties", 600, 3)
    alone = [EXACT.sample(*(column[i : i + 1].contiguous() for column in case)).item() for i in range(3)]
    assert EXACT.sample(*case).tolist() == alone


def test_sample_survives_rows_without_sense(small_chunks: None) -> None:
    """NaN, infinite or wholly excluded rows draw some id, and their neighbours draw theirs."""
    case = sampling_case("normal", 600, 8)
    expected, logits = EXACT.sample(*case), case[0].clone()
    logits[0], logits[1], logits[2, 3::5], logits[3, ::2] = torch.nan, -torch.inf, torch.inf, torch.nan
    got = EXACT.sample(logits, *case[1:])
    assert ((got >= 0) & (got < 600)).all()
    sane = torch.arange(8) > 3
    assert torch.equal(got[sane], expected[sane])


def best_first(logits: Tensor, count: int) -> list[list[int]]:
    """Ties go to the lowest id."""
    return [sorted(range(len(row)), key=lambda token: (-row[token], token))[:count] for row in logits.tolist()]


@pytest.mark.parametrize(("vocab_size", "count"), [(8, 8), (256, 8), (300, 1), (300, 8), (1000, 8), (600, 300)])
def test_top_ids(vocab_size: int, count: int, small_chunks: None) -> None:
    logits = torch.stack(
        [torch.randperm(vocab_size, generator=torch.Generator().manual_seed(i)).float() for i in (0, 1)]
    )
    logits[1] = (logits[1] / 3).floor()
    assert EXACT.top_ids(logits, count).tolist() == best_first(logits, count)


def test_top_ids_where_chunks_differ(small_chunks: None) -> None:
    """Every chunk better than all before it, none better than the first, all equal, and all but a few excluded."""
    rising, few = torch.arange(700.0), torch.full((700,), -torch.inf)
    few[[600, 301, 20]] = torch.tensor([2.0, torch.inf, 2.0])
    signs = torch.where(torch.arange(700) % 2 == 0, 0.0, -0.0)
    logits = torch.stack([rising, -rising, torch.full((700,), -torch.inf), few, signs])
    assert EXACT.top_ids(logits, 8).tolist() == best_first(logits, 8)


def test_top_ids_of_fewer_than_asked_for() -> None:
    assert EXACT.top_ids(torch.tensor([[1.0, -torch.inf, 2.0]]), 5).tolist() == [[2, 0, 1, 0, 0]]
