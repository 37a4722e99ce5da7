"""Norm, activation, rotation, embedding and GEMM in Triton against fp64, and the bits of a row in company."""

from __future__ import annotations

import math

import pytest
import torch
from specserve_kernels import load
from triton_case import EXACT, bits, normal

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
by_type = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
REFERENCE = load("reference")


def unit(dtype: torch.dtype) -> float:
    """The distance from 1 to the next value."""
    return torch.finfo(dtype).eps


@by_type
@pytest.mark.parametrize(("width", "spread"), [(1, 1.0), (33, 1e-3), (576, 100.0), (2049, 1.0), (64, 0.0)])
def test_rms_norm(dtype: torch.dtype, width: int, spread: float) -> None:
    x, weight = normal(3, width, dtype=dtype, spread=spread), normal(width, dtype=dtype, seed=1)
    got, expected = EXACT.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5)
    # the inner rounding may fall to the other side of a tie
    torch.testing.assert_close(got, expected, rtol=max(2 * unit(dtype), 1e-6), atol=1e-7)


@by_type
@pytest.mark.parametrize("width", [33, 2049])
def test_the_fused_sum_has_the_bits_of_the_two_apart(dtype: torch.dtype, width: int) -> None:
    x, delta, weight = (
        normal(*size, dtype=dtype, seed=seed) for seed, size in enumerate([(3, width)] * 2 + [(width,)])
    )
    total, normed = EXACT.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert torch.equal(bits(normed), bits(EXACT.rms_norm(total, weight, 1e-5)))


@by_type
@pytest.mark.parametrize(("inner", "spread"), [(1, 1.0), (33, 100.0), (1025, 4.0), (7, 1e4)])
def test_silu_mul(dtype: torch.dtype, inner: int, spread: float) -> None:
    gate_up = normal(3, 2 * inner, dtype=dtype, spread=spread)
    got, expected = EXACT.silu_mul(gate_up), REFERENCE.silu_mul(gate_up)
    torch.testing.assert_close(
        got, expected, rtol=max(unit(dtype), 1e-6), atol=1e-7 if dtype is torch.float16 else 1e-33
    )


@by_type
@pytest.mark.parametrize(("heads", "dim"), [(9, 64), (5, 20), (1, 2)])
def test_rope(dtype: torch.dtype, heads: int, dim: int) -> None:
    angles = torch.outer(torch.arange(50.0), 1e4 ** -(torch.arange(dim // 2) * 2 / dim))
    table = torch.cat((angles.cos(), angles.sin()), -1)
    x, positions = normal(3, heads, dim, dtype=dtype), torch.tensor([0, 49, 7])
    torch.testing.assert_close(
        EXACT.rope(x, positions, table), REFERENCE.rope(x, positions, table), rtol=unit(dtype), atol=1e-6
    )


@by_type
def test_embed(dtype: torch.dtype) -> None:
    raw, ids = normal(97, 1033, dtype=dtype), torch.tensor([96, 0, 0, 5])
    assert torch.equal(EXACT.embed(ids, EXACT.pack_linear(raw)), raw[ids])


def test_embed_of_int8() -> None:
    weight, ids = REFERENCE.pack_linear(normal(97, 33, dtype=torch.bfloat16), "int8"), torch.tensor([96, 0, 5])
    assert torch.equal(EXACT.embed(ids, weight), REFERENCE.embed(ids, weight))


@by_type
@pytest.mark.parametrize(("rows", "width", "outs"), [(1, 1, 1), (33, 65, 31), (3, 130, 33)])
@pytest.mark.parametrize("spread", [1.0, 1e3])
def test_linear(dtype: torch.dtype, rows: int, width: int, outs: int, spread: float) -> None:
    x, raw = normal(rows, width, dtype=dtype, spread=spread), normal(outs, width, dtype=dtype, seed=1)
    got = EXACT.linear(x, EXACT.pack_linear(raw)).double()
    expected = x.double() @ raw.double().T
    allowed = unit(dtype) * expected.abs() + width * 2**-24 * (x.double().abs() @ raw.double().abs().T)
    assert ((got - expected).abs() <= allowed).all()


def test_linear_gives_the_type_asked_for() -> None:
    x, raw = normal(3, 64, dtype=torch.bfloat16), normal(5, 64, dtype=torch.bfloat16, seed=1)
    got = EXACT.linear(x, EXACT.pack_linear(raw), torch.float32)
    torch.testing.assert_close(got, x.float() @ raw.float().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_int8_linear_is_exact(out_dtype: torch.dtype) -> None:
    x, raw = normal(34, 70, dtype=torch.bfloat16), normal(33, 70, dtype=torch.bfloat16, seed=1)
    x[3], x[4, 5] = 0.0, math.nan
    weight = EXACT.pack_linear(raw, "int8")
    got, expected = EXACT.linear(x, weight, out_dtype), REFERENCE.linear(x, weight, out_dtype)
    assert got[4].isnan().all()
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("dtype", "neighbour"), [(torch.bfloat16, math.nan), (torch.float32, math.inf), (torch.float16, 0.5)]
)
def test_a_row_does_not_see_its_neighbours(dtype: torch.dtype, neighbour: float) -> None:
    pool, weight = normal(35, 70, dtype=dtype), EXACT.pack_linear(normal(33, 70, dtype=dtype, seed=1))
    for index in (0, 16, 34):
        company = torch.full_like(pool, neighbour)
        company[index] = pool[index]
        for apply in (lambda x: EXACT.linear(x, weight), lambda x: EXACT.rms_norm(x, weight.raw[0], 1e-5)):
            assert torch.equal(bits(apply(company)[index]), bits(apply(pool[index : index + 1].clone())[0]))
