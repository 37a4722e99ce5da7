"""The noise: published Philox4x32-10 vectors, the layout of its counter and key, and G against fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specserve_kernels import PURPOSE_DRAFT, PURPOSE_TARGET, Ops, reference
from specserve_kernels.cpu import torch_ops
from torch import Tensor

Words = tuple[int, int, int, int]

# Random123, tests/kat_vectors: philox 4x32 with 10 rounds.
VECTORS: list[tuple[Words, tuple[int, int], Words]] = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
KEYS = [  # seed, draw index, choice
    (0, 0, 0),
    (1, 0, 0),
    (42, 7, 3),
    (2**32, 1, 0),
    (2**63, 5, 1),
    (2**64 - 1, 2**31, 65535),
    (0x299F31D0_A4093822, 0x05A308D3, 0x13198A2E),
]


def expected_words(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 written once more, from the paper (Salmon et al., SC'11)."""
    x0, x1, x2, x3 = counter
    for turn in range(10):
        k0, k1 = ((k + turn * weyl) & 0xFFFFFFFF for k, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        a, b = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ x3 ^ k1, a & 0xFFFFFFFF
    return x0, x1, x2, x3


def expected_noise(seed: int, draw_index: int, choice: int, purpose: int, vocab_size: int) -> np.ndarray:
    """G in fp64."""
    key = (seed & 0xFFFFFFFF, seed >> 32)
    words = [
        w for block in range(-(-vocab_size // 4)) for w in expected_words((block, draw_index, choice, purpose), key)
    ]
    uniform = (np.array(words[:vocab_size], dtype=np.float64) + 0.5) / 2.0**32
    return -np.log(-np.log(uniform))


def int64(values: list[int]) -> Tensor:
    """Unsigned 64-bit values as torch holds them."""
    return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64))


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_published_vectors(counter: Words, key: tuple[int, int], words: Words) -> None:
    assert expected_words(counter, key) == words
    assert reference.philox(counter, key) == words
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint64) for word in counter)
    assert tuple(int(word[0]) for word in torch_ops.philox((c0, c1, c2, c3), *key)) == words


@pytest.fixture(params=["backend", "reference"])
def every_ops(request: pytest.FixtureRequest, ops: Ops) -> Ops:
    """The backend under test, and the reference, which is only another backend here."""
    return ops if request.param == "backend" else reference


@pytest.mark.parametrize("purpose", [PURPOSE_TARGET, PURPOSE_DRAFT])
@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 1001])
def test_noise_is_within_two_ulp_of_fp64(every_ops: Ops, purpose: int, vocab_size: int) -> None:
    seeds, draws, choices = (int64(list(column)) for column in zip(*KEYS, strict=True))
    got = every_ops.noise(seeds, draws, choices, purpose, vocab_size).numpy()
    assert got.dtype == np.float32 and got.shape == (len(KEYS), vocab_size)
    expected = np.stack([expected_noise(*key, purpose, vocab_size) for key in KEYS])
    assert (np.abs(got - expected) <= 2 * np.spacing(np.abs(expected).astype(np.float32))).all()


def test_a_prefix_of_a_larger_vocabulary_is_the_same(ops: Ops) -> None:
    one = int64([9])
    assert torch.equal(ops.noise(one, one, one, 0, 1003)[:, :7], ops.noise(one, one, one, 0, 7))


def test_every_part_of_the_key_matters(ops: Ops) -> None:
    base = ops.noise(int64([5]), int64([6]), int64([7]), PURPOSE_TARGET, 64)
    others = [
        ops.noise(int64([5 + 2**40]), int64([6]), int64([7]), PURPOSE_TARGET, 64),
        ops.noise(int64([5 + 2**63]), int64([6]), int64([7]), PURPOSE_TARGET, 64),
        ops.noise(int64([5]), int64([7]), int64([6]), PURPOSE_TARGET, 64),
        ops.noise(int64([5]), int64([6]), int64([8]), PURPOSE_TARGET, 64),
        ops.noise(int64([5]), int64([6]), int64([7]), PURPOSE_DRAFT, 64),
    ]
    assert all((other != base).float().mean() > 0.9 for other in others)


def test_the_law_is_gumbel_and_always_finite(ops: Ops) -> None:
    drawn = ops.noise(int64([0, 1, 2, 3]), int64([0] * 4), int64([0] * 4), 0, 49152)
    assert drawn.isfinite().all()
    assert abs(drawn.mean().item() - 0.5772157) < 0.02
    assert abs(drawn.var().item() - np.pi**2 / 6) < 0.05
