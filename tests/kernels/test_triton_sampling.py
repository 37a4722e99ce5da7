"""Drawing in Triton: Philox's integers, G within 2 ulp, and the same ids as scoring every survivor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton_case  # noqa: F401  (chooses the interpreter)
from specserve_kernels import load
from specserve_kernels.triton import sampling
from test_native import LOGITS, expected_token, sampling_case
from test_noise import KEYS, VECTORS, expected_noise, int64
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


def check(kind: str, vocab_size: int, rows: int) -> None:
    case = sampling_case(kind, vocab_size, rows)
    logits, temperature, top_k, top_p, min_p, *key = case
    got = EXACT.sample(*case).tolist()
    noise = NOISE(*key, 0, vocab_size).numpy()
    parameters = [column.tolist() for column in (temperature, top_k, top_p, min_p)]
    expected = [
        expected_token(logits[i].numpy(), noise[i], *row) for i, row in enumerate(zip(*parameters, strict=True))
    ]
    assert got == expected


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


@pytest.mark.parametrize("vocab_size", [8, 300, 1000])
def test_top_ids(vocab_size: int, small_chunks: None) -> None:
    logits = torch.stack(
        [torch.randperm(vocab_size, generator=torch.Generator().manual_seed(i)).float() for i in (0, 1)]
    )
    logits[1] = (logits[1] / 3).floor()  # ties go to the lowest id
    expected = [sorted(range(vocab_size), key=lambda token: (-row[token], token))[:8] for row in logits.tolist()]
    assert EXACT.top_ids(logits, 8).tolist() == expected
