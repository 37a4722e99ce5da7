"""The native backend beyond the common tests: its instruction sets, its build, its refusals, its fused calls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from paged_case import PagedCase, Row, Shape, build_case
from specserve_kernels import AttentionRows, LinearWeight, reference
from specserve_kernels.cpu import native
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("error")
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float32: 2e-5}


def load(limit: str, monkeypatch: pytest.MonkeyPatch) -> native.NativeOps:
    monkeypatch.setenv("SPECSERVE_NATIVE_ISA", limit)
    try:
        ops = native.load()
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
    if ops.isa != limit:
        pytest.skip(f"this CPU has no {limit}")
    return ops


@pytest.fixture(params=native.ISAS)
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> native.NativeOps:
    """The backend held to each instruction set that this CPU has."""
    return load(request.param, monkeypatch)


@pytest.fixture
def best(monkeypatch: pytest.MonkeyPatch) -> native.NativeOps:
    """The backend as a user gets it."""
    monkeypatch.delenv("SPECSERVE_NATIVE_ISA", raising=False)
    try:
        return native.load()
    except native.NativeUnavailable as error:
        pytest.skip(str(error))


def normal(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (33, 31), (96, 128), (70, 577)])
def test_linear_per_isa(ops: native.NativeOps, dtype: torch.dtype, out_features: int, in_features: int) -> None:
    x, weight = normal(70, in_features, dtype=dtype), ops.pack_linear(normal(out_features, in_features, dtype=dtype))
    got = ops.linear(x, weight, torch.float32)
    expected = reference.linear(x, reference.pack_linear(weight.raw), torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * in_features**0.5)
    dirty = x.clone()
    dirty[1::2] = float("nan")
    for rows in (1, 2, 15, 17, 33, 70):
        assert same(ops.linear(x[:rows].clone(), weight, torch.float32), got[:rows])
        assert same(ops.linear(dirty[:rows].clone(), weight, torch.float32)[::2], got[:rows][::2])


CASES = {
    "chunk": [Row(0, past + 1) for past in range(250, 290)],
    "trees": [
        *(Row(1, 120, tuple(120 + n for n in path)) for path in ((), (0,), (0, 3), (1,), (1, 2), (1, 2, 9))),
        *(Row(2, 300, tuple(300 + n for n in path)) for path in ((0,), (0, 1), (0, 2), (0, 2, 30))),
        Row(0, 1),
        Row(0, 129),
    ],
}


def attention_case(name: str, shape: Shape, dtype: torch.dtype) -> PagedCase:
    return build_case(shape, CASES[name], dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [Shape(9, 3, 64, 16), Shape(4, 2, 40, 8), Shape(20, 1, 32, 16)], ids=str)
def test_attention_per_isa(ops: native.NativeOps, dtype: torch.dtype, name: str, shape: Shape) -> None:
    case = attention_case(name, shape, dtype)
    got = case.run(ops)
    torch.testing.assert_close(got, case.run(reference), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    count = len(case.rows)
    for index, poison in ((0, 1e38), (1, float("nan")), (count // 2, float("nan")), (count - 1, 1e38)):
        poisoned = case.poisoned(poison, [index])
        assert same(poisoned.select([index]).run(ops), got[index : index + 1])
        assert same(poisoned.run(ops)[index], got[index])


def test_threads_do_not_matter(best: native.NativeOps, dtype: torch.dtype) -> None:
    case = attention_case("trees", Shape(9, 3, 64, 16), dtype)
    x, weight = normal(40, 96, dtype=dtype), best.pack_linear(normal(100, 96, dtype=dtype))
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append((case.run(best), best.linear(x, weight), best.silu_mul(x)))
    finally:
        torch.set_num_threads(before)
    assert all(same(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def keys(*values: int) -> Tensor:
    return torch.tensor(values)


def test_noise_has_the_same_bits_on_every_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (keys(-1, 7), keys(3, 2**31), keys(0, 2), 0)
    plain = load("plain", monkeypatch).noise(*arguments, 1001)
    for limit in native.ISAS[1:]:
        assert same(plain, load(limit, monkeypatch).noise(*arguments, 1001))
    for vocab_size in (1, 31, 32, 33, 1000):
        assert same(plain[:, :vocab_size].contiguous(), load("plain", monkeypatch).noise(*arguments, vocab_size))


def expected_token(
    logits: np.ndarray, noise: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> int:
    """DESIGN 2 written down plainly."""
    if temperature < 1e-5:
        return int(np.argmax(logits))
    scaled = logits / np.float32(temperature)
    order = np.argsort(-logits, kind="stable")
    if 0 < top_k < len(order):
        order = order[:top_k]
    weights = np.exp(scaled[order].astype(np.float64) - scaled[order].max())
    if top_p < 1:
        count = int(np.argmax(np.cumsum(weights) >= top_p * weights.sum())) + 1
        order, weights = order[:count], weights[:count]
    if min_p > 0:
        order = order[weights >= min_p * weights.max()]
    order = np.sort(order)
    return int(order[np.argmax(scaled[order] + noise[order])])


@pytest.mark.parametrize("vocab_size", [1, 37, 5003])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 300.0])
def test_sample(ops: native.NativeOps, vocab_size: int, spread: float) -> None:
    settings = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.0, 0.7, 1.0, 40.0)
        for top_k, top_p, min_p in (
            (0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (50, 0.5, 0.02), (0, 0.999, 0.0), (1, 0.1, 0.9),
        )
    ]  # fmt: skip
    n = len(settings)
    logits = (normal(n, vocab_size) * spread).bfloat16().float()  # rounded: many ties
    logits[:, ::7] = float("-inf")
    logits[:, 0] = 0.0
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    seed, index, choice = torch.arange(n) - 3, torch.arange(n) * 11, torch.arange(n) % 3
    got = ops.sample(
        logits, torch.tensor(temperature), torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float64), torch.tensor(min_p, dtype=torch.float64), seed, index, choice,
    )  # fmt: skip
    noise = ops.noise(seed, index, choice, 0, vocab_size)
    expected = [expected_token(logits[i].numpy(), noise[i].numpy(), *settings[i]) for i in range(n)]
    assert got.tolist() == expected


LOGITS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, vocab: rng.normal(0, 1, vocab),
    "peaked": lambda rng, vocab: rng.normal(0, 4, vocab),
    "one_peak": lambda rng, vocab: np.where(np.arange(vocab) == vocab // 3, 30.0, rng.normal(0, 1, vocab)),
    "flat": lambda rng, vocab: np.full(vocab, -3.25),
    "ties": lambda rng, vocab: np.round(rng.normal(0, 2, vocab)),
    "zeros": lambda rng, vocab: np.where(rng.random(vocab) < 0.5, 0.0, -0.0),
    "adjacent": lambda rng, vocab: np.float32(3) + rng.integers(0, 4, vocab) * np.float32(2.4e-7),
    "coarse": lambda rng, vocab: 3e7 + 2.0 * rng.integers(0, 8, vocab),  # scores tie where logits do not
    "banned": lambda rng, vocab: np.where(np.arange(vocab) % 3 > rng.integers(0, 2), -np.inf, rng.normal(0, 3, vocab)),
    "few_equal": lambda rng, vocab: np.where(rng.permutation(vocab) < 8, 7.0, -np.inf),
    "one_left": lambda rng, vocab: np.where(np.arange(vocab) == vocab // 2, -7.0, -np.inf),
    "sorted": lambda rng, vocab: -np.sort(rng.normal(0, 2, vocab)),
    "large": lambda rng, vocab: rng.normal(0, 3e4, vocab),
    "huge": lambda rng, vocab: rng.normal(0, 1e30, vocab),
}


def sampling_case(kind: str, vocab_size: int, rows: int) -> tuple[Tensor, ...]:
    """Logits and random parameters, `sample`'s arguments."""
    rng = np.random.default_rng([vocab_size, len(kind), ord(kind[0])])
    counts = [0, 0, 0, 1, 2, 5, 50, 1023, 1024, 1025, vocab_size - 1, vocab_size]
    return (
        torch.from_numpy(np.stack([LOGITS[kind](rng, vocab_size) for _ in range(rows)]).astype(np.float32)),
        torch.from_numpy(rng.choice([0.0, 0.3, 0.8, 1.0, 1.0, 2.5, 100.0], rows).astype(np.float32)),
        torch.from_numpy(rng.choice(counts, rows).astype(np.int32)),
        torch.from_numpy(rng.choice([1.0, 1.0, 0.999, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 1e-6], rows)),
        torch.from_numpy(rng.choice([0.0, 0.0, 1e-4, 0.05, 0.5, 1.0], rows)),
        torch.from_numpy(rng.integers(-(1 << 63), 1 << 63, rows)),
        torch.from_numpy(rng.integers(0, 1 << 20, rows)),
        torch.from_numpy(rng.integers(0, 3, rows)),
    )


@pytest.mark.parametrize("vocab_size", [3, 17, 1000, 5003, 49_152, 128_256])
@pytest.mark.parametrize("kind", LOGITS)
def test_sample_is_the_argmax_over_all_survivors(
    best: native.NativeOps, kind: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ids as scoring every id, on every instruction set, and whatever shares the call or does the work."""
    rows = 40 if vocab_size < 10_000 else 10
    case = sampling_case(kind, vocab_size, rows)
    logits, temperature, top_k, top_p, min_p, *key = case
    alone = [best.sample(*(column[i : i + 1] for column in case)).item() for i in range(rows)]
    before = torch.get_num_threads()
    for limit in native.ISAS[: native.ISAS.index(best.isa) + 1]:
        ops = load(limit, monkeypatch)
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                assert ops.sample(*case).tolist() == alone
        finally:
            torch.set_num_threads(before)
    noise = best.noise(*key, 0, vocab_size).numpy()
    parameters = [column.tolist() for column in (temperature, top_k, top_p, min_p)]
    for i, row in enumerate(zip(*parameters, strict=True)):
        assert alone[i] == expected_token(logits[i].numpy(), noise[i], *row), f"row {i}: {row}"


def test_sample_survives_rows_without_sense(ops: native.NativeOps) -> None:
    """NaN, infinite or wholly excluded rows draw some id, and their neighbours draw theirs."""
    case = sampling_case("normal", 2000, 40)
    expected = ops.sample(*case)
    logits = case[0].clone()
    logits[0::8] = float("nan")
    logits[1::8] = float("-inf")
    logits[2::8, 3::5] = float("inf")
    logits[3::8, ::2] = float("nan")
    got = ops.sample(logits, *case[1:])
    assert ((got >= 0) & (got < 2000)).all()
    sane = torch.arange(40) % 8 > 3
    assert torch.equal(got[sane], expected[sane])


def test_sample_draws_in_proportion(best: native.NativeOps) -> None:
    """Frequencies over draw indices are the truncated softmax: 40,000 draws, each id within 5 standard deviations."""
    n, probabilities = 40_000, np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    logits = torch.full((1, 70), float("-inf"))
    logits[0, 10:70:10] = torch.from_numpy(np.log(probabilities)).float()
    for top_k, top_p, left in ((0, 1.0, 6), (0, 0.75, 3), (4, 1.0, 4), (5, 0.8, 3)):
        ids = best.sample(
            logits.repeat(n, 1), torch.ones(n), torch.full((n,), top_k, dtype=torch.int32),
            torch.full((n,), top_p, dtype=torch.float64), torch.zeros(n, dtype=torch.float64),
            torch.full((n,), 77), torch.arange(n), torch.zeros(n, dtype=torch.int64),
        )  # fmt: skip
        expected = probabilities[:left] / probabilities[:left].sum()
        counts = np.bincount(ids.numpy(), minlength=70)[10:70:10]
        assert counts.sum() == n
        assert (np.abs(counts[:left] - n * expected) < 5 * np.sqrt(n * expected * (1 - expected))).all()


def test_a_large_top_k_is_exactly_k(best: native.NativeOps) -> None:
    """Beyond what is listed: of equal logits the first 1,025 are drawn, the last of them too, and no other."""
    n, vocab_size, top_k = 20_000, 1100, 1025
    ids = best.sample(
        torch.zeros(1, vocab_size).repeat(n, 1), torch.ones(n), torch.full((n,), top_k, dtype=torch.int32),
        torch.ones(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64),
        torch.full((n,), 5), torch.arange(n), torch.zeros(n, dtype=torch.int64),
    )  # fmt: skip
    assert ids.unique().tolist() == list(range(top_k))


def test_attention_has_the_same_bits_on_any_number_of_threads(ops: native.NativeOps, dtype: torch.dtype) -> None:
    """However many threads share a sequence's splits, and wherever its rows are cut into blocks and clusters."""
    chunk_rows = [Row(0, 701 + index) for index in range(60)]
    tree = [Row(1, 390, tuple(range(392, 392 + depth))) for depth in range(12)]
    decode = [Row(2 + index, 1 + 97 * index) for index in range(9)]
    case = build_case(Shape(9, 3, 64, 16), [*chunk_rows, *tree, *decode], dtype)
    alone = torch.cat([case.select([index]).run(ops) for index in range(0, len(case.rows), 8)])
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        assert same(case.run(ops)[::8].contiguous(), alone)


@dataclass(frozen=True)
class Layer:
    """One layer of a small decoder."""

    attention_norm: Tensor
    qkv: LinearWeight
    output: LinearWeight
    mlp_norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight


HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, PAGES = 96, 160, 6, 2, 32, 2, 24


def small_model(ops: native.NativeOps, dtype: torch.dtype, quantization: str | None = None) -> native.DecoderModel:
    def matrix(rows: int, columns: int) -> LinearWeight:
        return ops.pack_linear(normal(rows, columns, dtype=dtype, seed=rows) / columns**0.5, quantization)

    norm = normal(HIDDEN, dtype=dtype) * 0.1 + 1
    layers = [
        Layer(
            norm, matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), matrix(HIDDEN, HEADS * DIM),
            norm, matrix(2 * INNER, HIDDEN), matrix(HIDDEN, INNER),
        )
        for _ in range(LAYERS)
    ]  # fmt: skip
    return native.DecoderModel(
        embed=matrix(50, HIDDEN), layers=layers, norm=norm, rope_table=normal(400, DIM), heads=HEADS,
        kv_heads=KV_HEADS, head_dim=DIM, eps=1e-5, scale=DIM**-0.5,
    )  # fmt: skip


def op_by_op(
    ops: native.NativeOps, model: native.DecoderModel, ids: Tensor, positions: Tensor, slots: Tensor,
    rows: AttentionRows, kv: Tensor,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    x, states = ops.embed(ids, model.embed), []
    for layer, cache in zip(model.layers, kv, strict=True):
        qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, model.eps), layer.qkv).view(len(ids), -1, DIM)
        rotated = ops.rope(qkv[:, : HEADS + KV_HEADS].contiguous(), positions, model.rope_table)
        k, v = rotated[:, HEADS:].contiguous(), qkv[:, HEADS + KV_HEADS :].contiguous()
        ops.write_kv(k, v, cache[0], cache[1], slots)
        attended = ops.attention(rotated[:, :HEADS].contiguous(), cache[0], cache[1], rows, model.scale)
        x = x + ops.linear(attended.view(len(ids), -1), layer.output)
        gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, model.eps), layer.gate_up)
        x = x + ops.linear(ops.silu_mul(gate_up), layer.down)
        states.append(x)
    return ops.rms_norm(x, model.norm, model.eps), states


def chunk(past: int, count: int) -> tuple[Tensor, Tensor, AttentionRows]:
    """Positions, slots and rows of a chunk over `past` tokens of one sequence."""
    table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))[None].int()
    positions = torch.arange(past, past + count)
    rows = AttentionRows(
        torch.zeros(count, dtype=torch.int32), positions.int() + 1, torch.zeros(count, 0, dtype=torch.int32),
        torch.zeros(count, dtype=torch.int32), table,
    )  # fmt: skip
    return positions, table[0, positions // 16].long() * 16 + positions % 16, rows


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(("past", "count"), [(0, 1), (130, 1), (131, 5), (40, 50)])
def test_fused_decoder_has_the_bits_of_the_ops(
    ops: native.NativeOps, dtype: torch.dtype, past: int, count: int, quantization: str | None, threads: int
) -> None:
    model = small_model(ops, dtype, quantization)
    positions, slots, rows = chunk(past, count)
    ids, kv = torch.arange(count) % 50, normal(LAYERS, 2, PAGES, KV_HEADS, 16, DIM, dtype=dtype)
    fused_kv, short_kv = kv.clone(), kv.clone()
    expected, states = op_by_op(ops, model, ids, positions, slots, rows, kv)
    decoder = ops.decoder(model)
    got, features = decoder.forward(ids, positions, slots, rows, fused_kv, feature_layers=[0, 1])
    assert same(got, expected)
    assert same(fused_kv, kv)
    assert same(features, torch.stack(states))
    _, first = decoder.forward(ids, positions, slots, rows, short_kv, num_layers=1, feature_layers=[0])
    assert same(first[0], states[0])


def test_wrong_inputs_raise(best: native.NativeOps) -> None:
    x, weight = normal(3, 8), best.pack_linear(normal(4, 8))
    for wrong in (x.double(), x.bfloat16(), x[:, :7], x.t(), normal(3, 16)[:, ::2], normal(8)):
        with pytest.raises((TypeError, ValueError)):
            best.linear(wrong, weight)
    with pytest.raises(TypeError, match="pack_linear"):
        best.linear(x, LinearWeight(weight.raw))
    with pytest.raises(IndexError, match="vocabulary"):
        best.embed(keys(4), weight)
    with pytest.raises(IndexError, match="rope"):
        best.rope(normal(1, 1, 8), keys(5), normal(5, 8))
    cache = normal(2, 1, 4, 8)
    for slot in (-1, 8):
        with pytest.raises(IndexError, match="slot"):
            best.write_kv(normal(1, 1, 8), normal(1, 1, 8), cache, cache.clone(), keys(slot))
        with pytest.raises(IndexError, match="slot"):
            best.move_kv(normal(1, 2, 2, 1, 4, 8), keys(0), keys(slot))


@pytest.mark.parametrize(
    "change",
    [
        {"sequence": [1]}, {"sequence": [-1]}, {"prefix_len": [0]}, {"prefix_len": [-1]}, {"prefix_len": [13]},
        {"prefix_len": [9]}, {"tail_len": [2]}, {"tail_len": [-1]}, {"tail_slots": [[12]], "tail_len": [1]},
        {"tail_slots": [[-1]], "tail_len": [1]}, {"tail_slots": [[8]], "tail_len": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_rows_raise(best: native.NativeOps, change: dict[str, list[int]]) -> None:
    fields: dict[str, list[int] | list[list[int]]] = {
        "sequence": [0], "prefix_len": [8], "tail_slots": [[0]], "tail_len": [0], "page_table": [[1, 0, 77]], **change,
    }  # fmt: skip
    rows = AttentionRows(**{name: torch.tensor(value, dtype=torch.int32) for name, value in fields.items()})
    with pytest.raises((IndexError, ValueError)):
        best.attention(normal(1, 1, 8), normal(2, 1, 4, 8), normal(2, 1, 4, 8), rows, 1.0)


BUILD = (
    "from pathlib import Path; import sys; from specserve_kernels.cpu import native; native.build(Path(sys.argv[1]))"
)


def test_two_processes_build_at_once(best: native.NativeOps, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(tmp_path / "cache")]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert len(list((tmp_path / "cache").glob("*/specserve_native.so"))) == 1
    assert {path.name for path in (tmp_path / "cache").glob("*/*")} == {"specserve_native.so", "lock"}
    loaded = native.load(tmp_path / "cache")
    assert loaded.isa == best.isa


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.NativeUnavailable, match=r"no C\+\+ compiler"):
        native.load(tmp_path)


def test_broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "cxx"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "cannot compile today" >&2; exit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(native.NativeUnavailable, match="cannot compile today"):
        native.load(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_unwritable_cache(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(native.NativeUnavailable, match="cannot write"):
        native.build(tmp_path / "cache")


def test_unknown_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSERVE_NATIVE_ISA", "sse9")
    with pytest.raises(ValueError, match="SPECSERVE_NATIVE_ISA"):
        native.load()
