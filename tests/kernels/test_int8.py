"""The int8 format: the same integers everywhere, the same bits everywhere, and rows that cannot see each other."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import specserve_kernels
import torch
from specserve_kernels import LinearWeight, Ops, int8, reference
from specserve_kernels.cpu import native, torch_ops
from torch import Tensor

SIZES = [(1, 1), (7, 33), (33, 31), (96, 128), (70, 577), (31, 1536), (3, 2050)]  # out, in
FEW = (1, 2, 15, 16, 17, 31, 32, 33, 64)


def normal(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nasty(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Plain rows, a zero one, huge and tiny ones, one with an outlier, one of equal values, denormals, −0."""
    x = normal(rows, width, dtype=torch.float32)
    kinds = (x[0], x[0] * 0, x[0] * 1e30, x[0] * 1e-30, x[0], x[0] * 0 + 3, x[0] * 1e-42, -x[0] * 0, x[0] * 1e-33)
    for index in range(rows):
        if index % 3 == 1:
            x[index] = kinds[index // 3 % len(kinds)]
            if index // 3 % len(kinds) == 4:
                x[index, index % width] = 5000.0
    return x.to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; any NaN equals any other."""
    nan = a.isnan()
    return a.dtype == b.dtype and torch.equal(nan, b.isnan()) and torch.equal(bits(a)[~nan], bits(b)[~nan])


@pytest.fixture(params=native.ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> native.NativeOps:
    """The native backend held to each instruction set that this CPU has."""
    monkeypatch.setenv("SPECSERVE_NATIVE_ISA", request.param)
    try:
        ops = native.load()
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
    if ops.isa != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    return ops


def native_digits(ops: native.NativeOps, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = x.shape
    digits = torch.full((-(-rows // 8), 2, 8, -(-width // 64) * 64), 99, dtype=torch.int8)
    scale = torch.empty(rows)
    ops._lib.spec_quantize(
        ops._kernels, x.data_ptr(), digits.data_ptr(), scale.data_ptr(), rows, width, native.TYPES[x.dtype]
    )
    high, low = digits.transpose(0, 1).flatten(1, 2)[:, :rows]
    assert not high[:, width:].any() and not low[:, width:].any(), "what pads a row must be zero"
    return high[:, :width], low[:, :width], scale


@pytest.mark.parametrize("width", [1, 15, 16, 33, 64, 577, 1536])
def test_native_finds_the_same_integers(isa: native.NativeOps, dtype: torch.dtype, width: int) -> None:
    x = nasty(40, width, dtype)
    x[5, 0], x[6, -1], x[7, width // 2] = math.nan, math.inf, -math.inf
    expected = int8.quantize_activations(x)
    for found, wanted in zip(native_digits(isa, x), expected, strict=True):
        assert same(found.clone(), wanted)


def test_the_integers_are_the_nearest(dtype: torch.dtype) -> None:
    """Within one fp32 rounding of exact arithmetic, so at most one off where that is near a tie."""
    x = nasty(12, 37, dtype)
    high, low, scale = int8.quantize_activations(x)
    assert (high.int().abs() <= 127).all()
    for row, digits, one in zip(x.tolist(), (high.int() * 256 + low).tolist(), scale.tolist(), strict=True):
        largest = max(Fraction(int8.FLOOR), *(abs(Fraction(v)) for v in row))
        for value, digit in zip(row, digits, strict=True):
            exact = Fraction(value) * 32512 / largest
            assert abs(exact - digit) <= Fraction(1, 2) + abs(exact) / 2**22
        assert one == pytest.approx(float(largest / 32512), rel=1e-7)


def test_halves_go_to_the_even_neighbour() -> None:
    row = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0]])
    integers, scale = int8.quantize_rows(row)
    assert integers.tolist() == [[127, 0, 2, 2, 0, -2, 126, -127]] and scale.tolist() == [1.0]
    high, low, _ = int8.quantize_activations(row * 256)
    assert (high.int() * 256 + low).tolist() == [[32512, 128, 384, 640, -128, -384, 32384, -32512]]
    assert high.tolist() == [[127, 1, 2, 3, 0, -1, 127, -127]] and low.min() == -128


@pytest.mark.parametrize(("out", "width"), SIZES)
def test_all_backends_have_the_same_bits(isa: native.NativeOps, dtype: torch.dtype, out: int, width: int) -> None:
    x, raw = nasty(40, width, dtype), nasty(out, width, dtype).roll(1, 0)
    x[5, 0], x[6, -1] = math.nan, math.inf
    weight = reference.pack_linear(raw, "int8")
    for out_dtype in (torch.float32, torch.bfloat16, None):
        expected = reference.linear(x, weight, out_dtype)
        assert expected[5].isnan().all() and expected[6].isnan().all()
        for ops in (torch_ops, isa):
            packed = ops.pack_linear(raw, "int8")
            assert torch.equal(packed.raw, weight.raw) and packed.raw.dtype is torch.int8
            assert same(ops.linear(x, packed, out_dtype), expected)


@pytest.mark.parametrize("width", [16400, 50001])
def test_the_largest_sums_are_exact(isa: native.NativeOps, width: int) -> None:
    """Sums far above 2^24, and above where a 16-bit or a saturating sum would end; digits of −128 included."""
    x = torch.full((2, width), 32640.0)  # all digits at once as large as they get
    x[1] = -32640.0
    x[:, 1::2] = x[:, 1::2] * (127.5 / 128)
    raw = torch.full((3, width), 127.0)
    raw[1] = -127.0
    expected = reference.linear(x, reference.pack_linear(raw, "int8"))
    for ops in (torch_ops, isa):
        assert same(ops.linear(x, ops.pack_linear(raw, "int8")), expected)
    torch.testing.assert_close(expected.double(), x.double() @ raw.double().T, rtol=1e-4, atol=0.0)


def test_too_wide_a_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 132104 inputs, this one has 132105"):
        torch_ops.pack_linear(torch.zeros(1, int8.MAX_IN_FEATURES + 1), "int8")
    with pytest.raises(ValueError, match="quantization is 'int4'; allowed: int8"):
        torch_ops.pack_linear(torch.zeros(1, 4), "int4")


@pytest.mark.parametrize(("out", "width"), [(960, 576), (576, 1536), (65, 129)])
@pytest.mark.parametrize("spread", [1e-20, 1.0, 1e15])
def test_linear_is_close_to_fp64(ops: Ops, dtype: torch.dtype, out: int, width: int, spread: float) -> None:
    x, raw = normal(33, width, dtype=dtype) * spread, normal(out, width, dtype=dtype, seed=1)
    got = ops.linear(x, ops.pack_linear(raw, "int8"), torch.float32).double()
    expected = x.double() @ raw.double().T
    assert float((got - expected).norm() / expected.norm()) < 0.012


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize(("out", "width"), [(576, 1536), (65, 129), (7, 33)])
def test_rows_do_not_see_each_other(ops: Ops, dtype: torch.dtype, threads: int, out: int, width: int) -> None:
    weight = ops.pack_linear(normal(out, width, dtype=dtype, seed=1) * 0.05, "int8")
    pool = nasty(64, width, dtype)
    alone = torch.cat([ops.linear(row[None].clone(), weight) for row in pool])
    for size in range(1, 65):
        chosen = [(size + index) % 64 for index in range(size)]
        assert same(ops.linear(pool[chosen], weight), alone[chosen])
    for stranger in (math.nan, math.inf, torch.finfo(dtype).max, 0.0):
        for size in FEW:
            batch = pool[:size].clone()
            batch[1::2] = stranger
            got = ops.linear(batch, weight)
            assert same(got[::2].clone(), alone[:size:2])
            assert got[1::2].isnan().all() or stranger in (0.0, torch.finfo(dtype).max)


def test_embed(isa: native.NativeOps, dtype: torch.dtype) -> None:
    raw = nasty(97, 33, dtype)
    ids = torch.tensor([96, 0, 4, 4, 5, 13])
    expected = reference.embed(ids, reference.pack_linear(raw, "int8"))
    assert expected.dtype is dtype
    torch.testing.assert_close(expected[1], raw[0], rtol=0.0, atol=float(raw[0].abs().max()) / 200)
    for ops in (torch_ops, isa):
        assert same(ops.embed(ids, int8.quantize_weight(raw)), expected), "a table need not be packed"
        assert same(ops.embed(ids, ops.pack_linear(raw, "int8")), expected)
    with pytest.raises(IndexError, match="vocabulary"):
        isa.embed(torch.tensor([97]), int8.quantize_weight(raw))


def test_rounding_to_bf16(isa: native.NativeOps) -> None:
    """Ties, subnormal numbers, what becomes infinite, NaN: as torch rounds them, whichever instruction does it.

    The row of an id is its scale here, so a table of ones shows what a scale is rounded to.
    """
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7F8000, 0x7FFFFF, 0x800000]
    edges += [0x3F808000, 0x3F818000, 0x3F818001]
    edges += [0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC12345, 0x7FFFFFFF]
    scale = torch.tensor([*edges, *(edge - 2**31 for edge in edges)], dtype=torch.int32).view(torch.float32)
    weight = LinearWeight(torch.ones(len(scale), 19, dtype=torch.int8), scale=scale, dtype=torch.bfloat16)
    got = isa.embed(torch.arange(len(scale)), weight)
    assert same(got, scale.bfloat16()[:, None].expand(-1, 19).contiguous())


def test_a_weight_that_is_not_finite_spoils_its_output_only(ops: Ops) -> None:
    raw = normal(40, 64)
    raw[7, 3] = math.nan
    got = ops.linear(normal(5, 64, seed=1), ops.pack_linear(raw, "int8"))
    assert got[:, 7].isnan().all() and got.isfinite().sum() == 5 * 39


def test_wrong_inputs_raise() -> None:
    try:
        ops = specserve_kernels.load("native")
    except specserve_kernels.BackendUnavailable as error:
        pytest.skip(str(error))
    weight = ops.pack_linear(normal(4, 8), "int8")
    for wrong in (normal(3, 8).double(), normal(3, 7), normal(8), normal(3, 16)[:, ::2]):
        with pytest.raises((TypeError, ValueError)):
            ops.linear(wrong, weight)
    with pytest.raises(TypeError, match="pack_linear"):
        ops.linear(normal(3, 8), LinearWeight(weight.raw, None, weight.scale, weight.dtype))
