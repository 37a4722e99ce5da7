"""Linear, embedding, norm, rotation and activation of each backend against fp64, at odd sizes and huge values."""

from __future__ import annotations

import pytest
import torch
from paged_case import load_or_skip
from specserve_kernels import Ops, load
from torch import Tensor


def normal(*size: int, dtype: torch.dtype, spread: float = 1.0, seed: int = 0) -> Tensor:
    """Random values of one type."""
    return (torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def unit(dtype: torch.dtype) -> float:
    """The distance from 1 to the next value: twice the relative error of one rounding."""
    return torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("rows", "width", "out"), [(1, 1, 1), (3, 33, 7), (33, 129, 65), (70, 576, 960), (5, 1536, 31)]
)
@pytest.mark.parametrize("spread", [1e-20, 1.0, 1e15])
def test_linear(ops: Ops, dtype: torch.dtype, rows: int, width: int, out: int, spread: float) -> None:
    x, raw = normal(rows, width, dtype=dtype, spread=spread), normal(out, width, dtype=dtype, seed=1)
    got = ops.linear(x, ops.pack_linear(raw)).double()
    assert got.shape == (rows, out)
    expected = x.double() @ raw.double().T
    # one rounding of the result, and fp32 sums: width * 2^-24 of the sum of magnitudes at worst
    allowed = unit(dtype) * expected.abs() + width * 2**-24 * (x.double().abs() @ raw.double().abs().T) + 1e-37
    assert ((got - expected).abs() <= allowed).all()


def test_linear_gives_the_type_asked_for(ops: Ops, dtype: torch.dtype) -> None:
    x, raw = normal(3, 576, dtype=dtype), normal(64, 576, dtype=dtype, seed=1)
    got = ops.linear(x, ops.pack_linear(raw), torch.float32)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), x.double() @ raw.double().T, rtol=unit(dtype), atol=1e-4)


def test_reference_linear_is_the_dot_product(dtype: torch.dtype) -> None:
    reference, x, raw = load("reference"), normal(3, 33, dtype=dtype), normal(7, 33, dtype=dtype, seed=1)
    got = reference.linear(x, reference.pack_linear(raw))
    assert torch.equal(got, torch.einsum("rk,ok->ro", x.double(), raw.double()).to(dtype))


def test_embed(ops: Ops, dtype: torch.dtype) -> None:
    raw = normal(97, 33, dtype=dtype)
    ids = torch.tensor([96, 0, 0, 5])
    assert torch.equal(ops.embed(ids, ops.pack_linear(raw)), raw[[96, 0, 0, 5]])


@pytest.mark.parametrize("width", [1, 7, 64, 129, 576, 577, 4097])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1.0, 1e12])
def test_rms_norm(ops: Ops, dtype: torch.dtype, width: int, spread: float) -> None:
    x, weight = normal(37, width, dtype=dtype, spread=spread), normal(width, dtype=dtype, seed=1)
    got, expected = ops.rms_norm(x, weight, 1e-5), load("reference").rms_norm(x, weight, 1e-5)
    # the inner rounding may fall to the other side of a tie
    torch.testing.assert_close(got, expected, rtol=2 * unit(dtype) if dtype is torch.bfloat16 else 1e-6, atol=0.0)


@pytest.mark.parametrize("backend", ["reference", "torch", "native"])
def test_the_sum_and_its_norm_have_the_bits_of_the_two_apart(backend: str, dtype: torch.dtype) -> None:
    ops = load_or_skip(backend)
    x, delta, weight = (normal(*size, dtype=dtype, seed=len(size)) for size in ((37, 577), (1, 37, 577), (577,)))
    total, normed = ops.add_rms_norm(x, delta[0], weight, 1e-5)
    assert torch.equal(total, x + delta[0]) and not torch.equal(total, x)
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize(("heads", "dim"), [(9, 64), (3, 64), (5, 20), (1, 2), (2, 128)])
def test_rope(ops: Ops, dtype: torch.dtype, heads: int, dim: int) -> None:
    angles = torch.outer(torch.arange(50.0), 1e4 ** -(torch.arange(dim // 2) * 2 / dim))
    table = torch.cat((angles.cos(), angles.sin()), -1)
    x, positions = normal(37, heads, dim, dtype=dtype), torch.randint(50, (37,))
    got, expected = ops.rope(x, positions, table), load("reference").rope(x, positions, table)
    torch.testing.assert_close(got, expected, rtol=unit(dtype), atol=1e-6)
    assert torch.equal(ops.rope(x, torch.zeros(37, dtype=torch.int64), table), x)


@pytest.mark.parametrize("inner", [1, 7, 33, 1536])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 100.0, 1e18])
def test_silu_mul(ops: Ops, dtype: torch.dtype, inner: int, spread: float) -> None:
    gate_up = normal(19, 2 * inner, dtype=dtype, spread=spread)
    got, expected = ops.silu_mul(gate_up), load("reference").silu_mul(gate_up)
    torch.testing.assert_close(got, expected, rtol=max(unit(dtype), 1e-6), atol=1e-33)
