"""Drawing on the device: truncation to a threshold, Philox noise, argmax; and the best ids of a row.

`sample` is three launches for all rows. `truncate` (one program a row) turns top-k and top-p into a bound on the logit
and, where logits are equal, on the id, so that everything after it is elementwise: logits become integers of the same
order, those that can matter are gathered, and bisection finds where the count or the mass is reached. Masses are fp32
exponentials summed in fp64 in fixed order. `draw` (one program per chunk of ids) finds the best score of its chunk:
fp32 logarithms point out the few ids that can be it, and only those get G from fp64 logarithms, as the definition has
it. `pick` takes the best chunk. Ties go to the lowest id. Integers equal the reference's, whatever the device.
"""

# Kernels are Triton's language in Python's clothes: their arguments are pointers and scalars that it types itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton.launch import ROW_WARPS, SAMPLE_BLOCK, SAMPLE_WARPS, TOP_BLOCK, padded, start

GREEDY_BELOW = tl.constexpr(1e-5)  # temperatures below draw the largest logit
_LOWEST = tl.constexpr(-(2**31))
_LAST = tl.constexpr(2**31 - 1)
_STEP = tl.constexpr(2.0**-32)
_LN2 = tl.constexpr(0.6931471805599453)
# How far an fp32 score may be from the true one: its logarithms are good to 1e-4, its sums to two roundings.
_NEAR = tl.constexpr(1e-3)
_NEAR_RELATIVE = tl.constexpr(2.0**-20)


@triton.jit
def philox(counter, seed, draw_index, choice, purpose):
    """Philox4x32-10 of (counter, draw_index, choice, purpose) under the key `seed`: four uint32 of counter's shape."""
    c0 = counter.to(tl.uint32)
    c1 = c0 * 0 + (draw_index & 0xFFFFFFFF).to(tl.uint32)
    c2 = c0 * 0 + (choice & 0xFFFFFFFF).to(tl.uint32)
    c3 = (c0 * 0 + purpose).to(tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a = c0 * 0 + 0xD2511F53
    b = c0 * 0 + 0xCD9E8D57
    for _ in tl.static_range(10):
        high0, high1 = tl.umulhi(a, c0), tl.umulhi(b, c2)
        low0, low1 = a * c0, b * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _words(first, seed, draw_index, choice, purpose, BLOCK: tl.constexpr):
    """The words of ids first … first + BLOCK − 1; `first` is a multiple of 4."""
    c0, c1, c2, c3 = philox(first // 4 + tl.arange(0, BLOCK // 4), seed, draw_index, choice, purpose)
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [BLOCK])


@triton.jit
def _gumbel(word):
    """G = −log(−log((word + 0.5) * 2^-32)) in fp64, rounded to fp32."""
    uniform = (word.to(tl.float64) + 0.5) * _STEP
    return (0.0 - tl.log(0.0 - tl.log(uniform))).to(tl.float32)


@triton.jit
def _gumbel_near(word):
    """G to 1e-4, in fp32: above one half, −log u is taken from 1 − u, which has the digits that u has lost."""
    upper = word >= 0x80000000
    rest = (tl.where(upper, ~word, word).to(tl.float32) + 0.5) * _STEP  # 1 − u above one half, u below
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))
    inner = 0.0 - tl.log(tl.where(upper, 1.0 - rest, rest))
    return 0.0 - tl.log(tl.where(upper & (rest < 0.02), series, inner))


@triton.jit
def noise_kernel(seed, draw_index, choice, purpose, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    ids = first + tl.arange(0, BLOCK)
    word = _words(first, tl.load(seed + row), tl.load(draw_index + row), tl.load(choice + row), purpose, BLOCK)
    tl.store(out + row * size + ids, _gumbel(word), mask=ids < size)


def noise(seed: Tensor, draw_index: Tensor, choice: Tensor, purpose: int, vocab_size: int) -> Tensor:
    """Gumbel noise fp32 [n, vocab_size] for n keys (int64 [n] each)."""
    rows = seed.shape[0]
    out = torch.empty(rows, vocab_size, dtype=torch.float32, device=seed.device)
    block = min(padded(vocab_size, 4), SAMPLE_BLOCK)
    grid = (rows, triton.cdiv(vocab_size, block))
    start(noise_kernel, grid, seed, draw_index, choice, purpose, out, vocab_size, BLOCK=block, warps=SAMPLE_WARPS)
    return out


@triton.jit
def _ordered(value):
    """fp32 → int32 of the same order; −0 and +0 are one."""
    raw = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(raw < 0, raw ^ 0x7FFFFFFF, raw)


@triton.jit
def _value(key):
    """The fp32 that `_ordered` made this integer of (int64 scalar within int32)."""
    raw = key.to(tl.int32)
    return tl.where(raw < 0, raw ^ 0x7FFFFFFF, raw).to(tl.float32, bitcast=True)


@triton.jit
def _count_from(kept, count, key, BLOCK: tl.constexpr):
    """How many of `count` gathered logits are at `key` or above."""
    found = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        value = tl.load(kept + place, mask=place < count, other=0.0)
        found += ((_ordered(value) >= key) & (place < count)).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def _mass_from(kept, count, key, largest, temperature, BLOCK: tl.constexpr):
    """The softmax mass, exp(logit / T − largest), of those at `key` or above: fp64."""
    mass = tl.zeros([BLOCK], tl.float64)
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        value = tl.load(kept + place, mask=place < count, other=0.0)
        weight = tl.exp(tl.div_rn(value, temperature) - largest).to(tl.float64)
        mass += tl.where((_ordered(value) >= key) & (place < count), weight, 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def truncate_kernel(
    logits, temperature, top_k, top_p, min_p, kept, bound, last_tie, floor, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: logits whose order is above `bound`, or equal and of an id ≤ `last_tie`, and whose scaled value is at
    least `floor`, survive. `kept` is scratch of the size of `logits`."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    most = tl.load(top_k + row)
    most = tl.where((most >= size) | (most < 0), 0, most)
    share = tl.load(top_p + row)
    least = tl.load(min_p + row)
    logits += row * size
    kept += row * size
    tl.store(bound + row, _LOWEST)
    tl.store(last_tie + row, _LAST)
    tl.store(floor + row, float("-inf"))
    lane = tl.arange(0, BLOCK)
    if (heat >= GREEDY_BELOW) & ((most > 0) | (share < 1.0) | (least > 0.0)):
        lane_best = tl.full([BLOCK], _LOWEST, tl.int32)
        for first in range(0, size, BLOCK):
            value = tl.load(logits + first + lane, mask=first + lane < size, other=float("-inf"))
            lane_best = tl.maximum(lane_best, tl.where(first + lane < size, _ordered(value), _LOWEST))
        highest = tl.max(lane_best, axis=0).to(tl.int64)
        largest = tl.div_rn(_value(highest), heat)
        if least > 0.0:
            tl.store(floor + row, (largest.to(tl.float64) + tl.log(least)).to(tl.float32))

        # What is below `cut` is certainly not kept: the lanes hold `most` logits above it, or the mass below is small.
        cut = highest * 0 + _LOWEST
        total = share * 0.0
        if most > 0:
            above = highest + 1
            while above - cut > 1:
                middle = (above + cut) // 2
                enough = tl.sum((lane_best >= middle.to(tl.int32)).to(tl.int32), axis=0) >= most
                cut = tl.where(enough, middle, cut)
                above = tl.where(enough, above, middle)
        elif share < 1.0:
            total = _mass_from(logits, size, _LOWEST, largest, heat, BLOCK)
            negligible = largest + tl.log((1.0 - share) * total / size).to(tl.float32) - 0.01
            cut = _ordered(negligible * heat - tl.abs(negligible * heat) * 1e-5).to(tl.int64)
            cut = tl.minimum(cut, highest)

        if (most > 0) | (share < 1.0):
            count = most * 0
            for first in range(0, size, BLOCK):
                value = tl.load(logits + first + lane, mask=first + lane < size, other=0.0)
                matters = (first + lane < size) & (_ordered(value) >= cut.to(tl.int32))
                tl.store(kept + count + tl.cumsum(matters.to(tl.int32), axis=0) - 1, value, mask=matters)
                count += tl.sum(matters.to(tl.int32), axis=0)
            tl.debug_barrier()  # other threads read what these stored

            allowed = count  # of those at `cut` exactly
            if most > 0:
                above = highest + 1
                while above - cut > 1:
                    middle = (above + cut) // 2
                    enough = _count_from(kept, count, middle.to(tl.int32), BLOCK) >= most
                    cut = tl.where(enough, middle, cut)
                    above = tl.where(enough, above, middle)
                allowed = most - _count_above(kept, count, cut, highest, BLOCK)
            if share < 1.0:
                start = cut
                if most > 0:
                    total = _mass_above(kept, count, cut, highest, largest, heat, BLOCK)
                    total += allowed * tl.exp(tl.div_rn(_value(cut), heat) - largest).to(tl.float64)
                wanted = share * total
                above = highest + 1
                while above - cut > 1:
                    middle = (above + cut) // 2
                    enough = _mass_from(kept, count, middle.to(tl.int32), largest, heat, BLOCK) >= wanted
                    cut = tl.where(enough, middle, cut)
                    above = tl.where(enough, above, middle)
                weight = tl.exp(tl.div_rn(_value(cut), heat) - largest).to(tl.float64)
                missing = wanted - _mass_above(kept, count, cut, highest, largest, heat, BLOCK)
                needed = tl.where(weight * count > missing, tl.ceil(missing / weight), count).to(tl.int32)
                allowed = tl.maximum(tl.minimum(needed, tl.where(cut == start, allowed, count)), 1)
            tl.store(bound + row, cut.to(tl.int32))

            ties = _count_from(kept, count, cut.to(tl.int32), BLOCK) - _count_above(kept, count, cut, highest, BLOCK)
            if ties > allowed:
                passed = most * 0
                for first in range(0, size, BLOCK):
                    value = tl.load(logits + first + lane, mask=first + lane < size, other=0.0)
                    tie = ((first + lane < size) & (_ordered(value) == cut.to(tl.int32))).to(tl.int32)
                    rank = passed + tl.cumsum(tie, axis=0)
                    here = tl.max(tl.where((tie > 0) & (rank == allowed), first + lane, -1), axis=0)
                    if here >= 0:
                        tl.store(last_tie + row, here)
                    passed += tl.sum(tie, axis=0)


@triton.jit
def _count_above(kept, count, key, highest, BLOCK: tl.constexpr):
    found = count * 0
    if key < highest:
        found += _count_from(kept, count, (key + 1).to(tl.int32), BLOCK)
    return found


@triton.jit
def _mass_above(kept, count, key, highest, largest, temperature, BLOCK: tl.constexpr):
    mass = (count * 0).to(tl.float64)
    if key < highest:
        mass += _mass_from(kept, count, (key + 1).to(tl.int32), largest, temperature, BLOCK)
    return mass


@triton.jit
def draw_kernel(
    logits, temperature, seed, draw_index, choice, bound, last_tie, floor, scores, best_ids, size, num_chunks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The best score of one chunk of one row, and its lowest id; −inf where nothing survives."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    ids = first + tl.arange(0, BLOCK)
    value = tl.load(logits + row * size + ids, mask=ids < size, other=float("-inf"))
    heat = tl.load(temperature + row)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0, tl.int32) + first
    if heat < GREEDY_BELOW:
        best = tl.max(value, axis=0)
        best_id = tl.min(tl.where(value == best, ids, _LAST), axis=0)
    else:
        scaled = tl.div_rn(value, heat)
        key, limit = _ordered(value), tl.load(bound + row)
        alive = (key > limit) | ((key == limit) & (ids <= tl.load(last_tie + row)))
        alive = alive & (scaled >= tl.load(floor + row)) & (ids < size)
        key_seed, key_index, key_choice = tl.load(seed + row), tl.load(draw_index + row), tl.load(choice + row)
        near = scaled + _gumbel_near(_words(first, key_seed, key_index, key_choice, 0, BLOCK))
        near = tl.where(alive, near, float("-inf"))
        peak = tl.max(near, axis=0)
        reach = peak - (2.0 * _NEAR + 2.0 * _NEAR_RELATIVE * tl.abs(peak))
        left = (near >= reach) & (near > float("-inf"))
        while tl.max(left.to(tl.int32), axis=0) > 0:
            candidate = tl.min(tl.where(left, ids, _LAST), axis=0)
            w0, w1, w2, w3 = philox(candidate // 4, key_seed, key_index, key_choice, 0)
            turn = candidate % 4
            word = tl.where(turn == 0, w0, tl.where(turn == 1, w1, tl.where(turn == 2, w2, w3)))
            score = tl.sum(tl.where(ids == candidate, scaled, 0.0), axis=0) + _gumbel(word)
            best_id = tl.where(score > best, candidate, best_id)
            best = tl.maximum(best, score)
            left = left & (ids != candidate)
    tl.store(scores + row * num_chunks + tl.program_id(1), best)
    tl.store(best_ids + row * num_chunks + tl.program_id(1), tl.minimum(best_id, size - 1))


@triton.jit
def pick_kernel(scores, best_ids, out, num_chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    score = tl.load(scores + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    ids = tl.load(best_ids + row * num_chunks + chunk, mask=chunk < num_chunks, other=_LAST)
    best = tl.min(tl.where(score == tl.max(score, axis=0), ids, _LAST), axis=0)
    tl.store(out + row, tl.where(best == _LAST, 0, best).to(tl.int64))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    draw_index: Tensor,
    choice: Tensor,
) -> Tensor:
    """One id per row of processed logits, fp32 [n, vocab] → int64 [n]; arguments as in FusedSampler."""
    rows, size = logits.shape
    block = min(padded(size, 4), SAMPLE_BLOCK)
    chunks = triton.cdiv(size, block)
    kept, scores = torch.empty_like(logits), logits.new_empty(rows, chunks)
    bound, last_tie = (logits.new_empty(rows, dtype=torch.int32) for _ in range(2))
    floor, best_ids = logits.new_empty(rows), logits.new_empty(rows, chunks, dtype=torch.int32)
    out = logits.new_empty(rows, dtype=torch.int64)
    start(
        truncate_kernel, (rows,), logits, temperature, top_k, top_p, min_p, kept, bound, last_tie, floor, size,
        BLOCK=block, warps=SAMPLE_WARPS,
    )  # fmt: skip
    start(
        draw_kernel, (rows, chunks), logits, temperature, seed, draw_index, choice, bound, last_tie, floor, scores,
        best_ids, size, chunks, BLOCK=block, warps=SAMPLE_WARPS,
    )  # fmt: skip
    start(pick_kernel, (rows,), scores, best_ids, out, chunks, CHUNKS=padded(chunks), warps=1)
    return out


@triton.jit
def top_kernel(logits, ids_in, values, ids_out, size, COUNT: tl.constexpr, BLOCK: tl.constexpr, INDEXED: tl.constexpr):
    """The COUNT largest of one chunk of one row, best first, lowest id first among equals; ids_in names the ids."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    value = tl.load(logits + row * size + place, mask=inside, other=float("-inf"))
    ids = place.to(tl.int64)
    if INDEXED:
        ids = tl.load(ids_in + row * size + place, mask=inside, other=0)
    key = tl.where(inside, _ordered(value).to(tl.int64), _LOWEST - 1)
    target = (row * tl.num_programs(1) + tl.program_id(1)) * COUNT
    for turn in range(COUNT):
        best = tl.max(key, axis=0)
        winner = tl.min(tl.where((key == best) & inside, ids, _LAST), axis=0)
        tl.store(values + target + turn, tl.max(tl.where(inside & (ids == winner), value, float("-inf")), axis=0))
        tl.store(ids_out + target + turn, tl.where(best < _LOWEST, 0, winner))
        key = tl.where(ids == winner, _LOWEST - 1, key)


def top_ids(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits of each row, fp32 [rows, vocab] → int64 [rows, count]; lowest id first."""
    rows, size = logits.shape
    block = min(padded(size), max(TOP_BLOCK, padded(count)))
    chunks = triton.cdiv(size, block)
    values = logits.new_empty(rows, chunks * count)
    ids = logits.new_empty(rows, chunks * count, dtype=torch.int64)
    constants = {"COUNT": count, "warps": ROW_WARPS}
    start(top_kernel, (rows, chunks), logits, ids, values, ids, size, BLOCK=block, INDEXED=False, **constants)
    if chunks == 1:
        return ids
    # a chunk with fewer than `count` ids repeats id 0 at −inf, which loses to its first appearance
    best = logits.new_empty(rows, count, dtype=torch.int64)
    width = chunks * count
    start(
        top_kernel, (rows, 1), values, ids, values.new_empty(rows, count), best, width, BLOCK=padded(width),
        INDEXED=True, **constants,
    )  # fmt: skip
    return best
