"""Drawing on the device: truncation to a threshold, Philox noise, argmax; and the best ids of a row.

`sample` and `top_ids` are one launch each: one program a row, which goes over the vocabulary in chunks. A row then has
one multiprocessor to itself and no more, but every launch saved is 10 to 20 µs of the host, which ought to weigh more;
that is reasoning, nothing was measured on a GPU.

`sample` first turns top-k and top-p into a bound on the logit and, where logits are equal, on the id, so that all else
is elementwise: logits become integers of the same order, those that can matter are gathered, and bisection finds where
the count or the mass is reached. Masses are fp32 exponentials summed in fp64 in fixed order. Then it scores the
survivors chunk by chunk: fp32 logarithms point out the few ids that can be the best so far, and only those get G from
fp64 logarithms, as the definition has it. Ties go to the lowest id. Integers equal the reference's on any device.
"""

# Kernels are Triton's language in Python's clothes: their arguments are pointers and scalars that it types itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton.launch import SAMPLE_BLOCK, SAMPLE_WARPS, TOP_BLOCK, padded, start

GREEDY_BELOW = tl.constexpr(1e-5)  # temperatures below draw the largest logit
_LOWEST = tl.constexpr(-(2**31))
_LAST = tl.constexpr(2**31 - 1)
_LOWEST_PAIR = tl.constexpr(-(2**63))
_HIGHEST_PAIR = tl.constexpr(2**63 - 1)
_STEP = tl.constexpr(2.0**-32)
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
def _weight(value, largest, heat):
    """exp(logit / T − largest), an fp32 exponential: fp64."""
    return tl.exp(tl.div_rn(value, heat) - largest).to(tl.float64)


@triton.jit
def _mass_from(kept, count, key, largest, heat, BLOCK: tl.constexpr):
    """The softmax mass of those at `key` or above: fp64."""
    mass = tl.zeros([BLOCK], tl.float64)
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        value = tl.load(kept + place, mask=place < count, other=0.0)
        mass += tl.where((_ordered(value) >= key) & (place < count), _weight(value, largest, heat), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _count_above(kept, count, key, highest, BLOCK: tl.constexpr):
    found = count * 0
    if key < highest:
        found += _count_from(kept, count, (key + 1).to(tl.int32), BLOCK)
    return found


@triton.jit
def _mass_above(kept, count, key, highest, largest, heat, BLOCK: tl.constexpr):
    mass = (count * 0).to(tl.float64)
    if key < highest:
        mass += _mass_from(kept, count, (key + 1).to(tl.int32), largest, heat, BLOCK)
    return mass


@triton.jit
def _lane_best(logits, size, BLOCK: tl.constexpr):
    """The largest of the logits that each lane meets, as integers."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], _LOWEST, tl.int32)
    for first in range(0, size, BLOCK):
        value = tl.load(logits + first + lane, mask=first + lane < size, other=float("-inf"))
        best = tl.maximum(best, tl.where(first + lane < size, _ordered(value), _LOWEST))
    return best


@triton.jit
def _surely_out(logits, lane_best, highest, largest, heat, most, share, size, BLOCK: tl.constexpr):
    """A key below which certainly nothing survives, and the mass of the row where top-p needs that.

    The lanes hold `most` logits at the key or above it, or the mass below it is too small to count.
    """
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
    return cut, total


@triton.jit
def _gather(logits, kept, cut, size, BLOCK: tl.constexpr):
    """Write the logits at `cut` or above to `kept`, in order of ids; returns how many there are."""
    lane = tl.arange(0, BLOCK)
    count = tl.full([], 0, tl.int32)
    for first in range(0, size, BLOCK):
        value = tl.load(logits + first + lane, mask=first + lane < size, other=0.0)
        matters = (first + lane < size) & (_ordered(value) >= cut.to(tl.int32))
        tl.store(kept + count + tl.cumsum(matters.to(tl.int32), axis=0) - 1, value, mask=matters)
        count += tl.sum(matters.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads read what these stored
    return count


@triton.jit
def _top_k(kept, count, cut, most, highest, BLOCK: tl.constexpr):
    """The order of the last of the `most` largest, and how many of that order are among them.

    Nothing gathered is below `cut`.
    """
    above = highest + 1
    while above - cut > 1:
        middle = (above + cut) // 2
        enough = _count_from(kept, count, middle.to(tl.int32), BLOCK) >= most
        cut = tl.where(enough, middle, cut)
        above = tl.where(enough, above, middle)
    return cut, most - _count_above(kept, count, cut, highest, BLOCK)


@triton.jit
def _top_p(kept, count, cut, allowed, wanted, highest, largest, heat, BLOCK: tl.constexpr):
    """The order at which the mass from above reaches `wanted`, and how many of that order it takes.

    Nothing gathered is below `cut`, and no more than `allowed` are left there.
    """
    start = cut
    above = highest + 1
    while above - cut > 1:
        middle = (above + cut) // 2
        enough = _mass_from(kept, count, middle.to(tl.int32), largest, heat, BLOCK) >= wanted
        cut = tl.where(enough, middle, cut)
        above = tl.where(enough, above, middle)
    weight = _weight(_value(cut), largest, heat)
    missing = wanted - _mass_above(kept, count, cut, highest, largest, heat, BLOCK)
    needed = tl.where(weight * count > missing, tl.ceil(missing / weight), count).to(tl.int32)
    return cut, tl.maximum(tl.minimum(needed, tl.where(cut == start, allowed, count)), 1)


@triton.jit
def _id_of_tie(logits, cut, which, size, BLOCK: tl.constexpr):
    """The id of number `which`, from 1, of the logits of order `cut`."""
    lane = tl.arange(0, BLOCK)
    passed = tl.full([], 0, tl.int32)
    found = tl.full([], _LAST, tl.int32)
    for first in range(0, size, BLOCK):
        value = tl.load(logits + first + lane, mask=first + lane < size, other=0.0)
        tie = ((first + lane < size) & (_ordered(value) == cut.to(tl.int32))).to(tl.int32)
        rank = passed + tl.cumsum(tie, axis=0)
        found = tl.minimum(found, tl.min(tl.where((tie > 0) & (rank == which), first + lane, _LAST), axis=0))
        passed += tl.sum(tie, axis=0)
    return found


@triton.jit
def _truncated(logits, kept, heat, most, share, least, size, BLOCK: tl.constexpr):
    """Bound, last tie and floor of one row; `kept` is scratch of the row's size.

    Logits whose order is above the bound, or equal and of an id ≤ the last tie, and whose scaled value is at least the
    floor, survive.
    """
    bound = tl.full([], _LOWEST, tl.int32)
    last_tie = tl.full([], _LAST, tl.int32)
    floor = tl.full([], float("-inf"), tl.float32)
    if (most > 0) | (share < 1.0) | (least > 0.0):
        lane_best = _lane_best(logits, size, BLOCK)
        highest = tl.max(lane_best, axis=0).to(tl.int64)
        largest = tl.div_rn(_value(highest), heat)
        if least > 0.0:
            floor = (largest.to(tl.float64) + tl.log(least)).to(tl.float32)
        if (most > 0) | (share < 1.0):
            cut, total = _surely_out(logits, lane_best, highest, largest, heat, most, share, size, BLOCK)
            count = _gather(logits, kept, cut, size, BLOCK)
            allowed = count  # of those at `cut` exactly
            if most > 0:
                cut, allowed = _top_k(kept, count, cut, most, highest, BLOCK)
            if share < 1.0:
                if most > 0:
                    total = _mass_above(kept, count, cut, highest, largest, heat, BLOCK)
                    total += allowed * _weight(_value(cut), largest, heat)
                cut, allowed = _top_p(kept, count, cut, allowed, share * total, highest, largest, heat, BLOCK)
            bound = cut.to(tl.int32)
            ties = _count_from(kept, count, bound, BLOCK) - _count_above(kept, count, cut, highest, BLOCK)
            if ties > allowed:
                last_tie = _id_of_tie(logits, cut, allowed, size, BLOCK)
    return bound, last_tie, floor


@triton.jit
def _largest_id(logits, size, BLOCK: tl.constexpr):
    """The lowest id of the largest logit."""
    lane = tl.arange(0, BLOCK)
    lane_best = tl.full([BLOCK], float("-inf"), tl.float32)
    lane_id = lane
    for first in range(0, size, BLOCK):
        value = tl.load(logits + first + lane, mask=first + lane < size, other=float("-inf"))
        better = value > lane_best
        lane_best = tl.where(better, value, lane_best)
        lane_id = tl.where(better, first + lane, lane_id)
    return tl.min(tl.where(lane_best == tl.max(lane_best, axis=0), lane_id, _LAST), axis=0)


@triton.jit
def _drawn_id(logits, heat, bound, last_tie, floor, seed, draw_index, choice, size, BLOCK: tl.constexpr):
    """The lowest id of the best score, logit / T + G, of what survives (see `_truncated`); 0 where nothing does."""
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0, tl.int32)
    peak = tl.full([], float("-inf"), tl.float32)
    for first in range(0, size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        value = tl.load(logits + ids, mask=ids < size, other=float("-inf"))
        scaled, key = tl.div_rn(value, heat), _ordered(value)
        alive = (key > bound) | ((key == bound) & (ids <= last_tie))
        alive = alive & (scaled >= floor) & (ids < size)
        if tl.max(alive.to(tl.int32), axis=0) > 0:  # of a truncated row, most chunks are empty
            near = scaled + _gumbel_near(_words(first, seed, draw_index, choice, 0, BLOCK))
            near = tl.where(alive, near, float("-inf"))
            # fp32 scores are at most one error off: two below the peak, here or in a chunk before, is a lower score.
            peak = tl.maximum(peak, tl.max(near, axis=0))
            reach = peak - (2.0 * _NEAR + 2.0 * _NEAR_RELATIVE * tl.abs(peak))
            left = (near >= reach) & (near > float("-inf"))
            while tl.max(left.to(tl.int32), axis=0) > 0:
                candidate = tl.min(tl.where(left, ids, _LAST), axis=0)
                w0, w1, w2, w3 = philox(candidate // 4, seed, draw_index, choice, 0)
                turn = candidate % 4
                word = tl.where(turn == 0, w0, tl.where(turn == 1, w1, tl.where(turn == 2, w2, w3)))
                score = tl.sum(tl.where(ids == candidate, scaled, 0.0), axis=0) + _gumbel(word)
                best_id = tl.where(score > best, candidate, best_id)
                best = tl.maximum(best, score)
                left = left & (ids != candidate)
    return best_id


@triton.jit
def sample_kernel(
    logits, temperature, top_k, top_p, min_p, seed, draw_index, choice, kept, out, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """The id of one row. `kept` is scratch of the size of `logits`."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    logits += row * size
    drawn = tl.full([], 0, tl.int32)
    if heat < GREEDY_BELOW:
        drawn = _largest_id(logits, size, BLOCK)
    else:
        most, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        most = tl.where((most >= size) | (most < 0), 0, most)
        bound, last_tie, floor = _truncated(logits, kept + row * size, heat, most, share, least, size, BLOCK)
        key_seed, key_index, key_choice = tl.load(seed + row), tl.load(draw_index + row), tl.load(choice + row)
        drawn = _drawn_id(logits, heat, bound, last_tie, floor, key_seed, key_index, key_choice, size, BLOCK)
    tl.store(out + row, drawn.to(tl.int64))


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
    kept, out = torch.empty_like(logits), logits.new_empty(rows, dtype=torch.int64)
    start(
        sample_kernel, (rows,), logits, temperature, top_k, top_p, min_p, seed, draw_index, choice, kept, out, size,
        BLOCK=min(padded(size, 4), SAMPLE_BLOCK), warps=SAMPLE_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def top_kernel(logits, out, size, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The ids of the COUNT largest of one row, best first, lowest id first among equals; WIDTH is COUNT, padded.

    A logit and its id are one int64, the logit's order above the id's complement: larger is better, and no two are
    equal. `listed` holds the best so far in no order, at first COUNT different ones that lose to any.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    listed = tl.where(place < COUNT, place.to(tl.int64) + _LOWEST_PAIR, _HIGHEST_PAIR)
    worst = tl.min(listed, axis=0)
    for first in range(0, size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        value = tl.load(logits + row * size + ids, mask=ids < size, other=float("-inf"))
        pair = (_ordered(value).to(tl.int64) << 32) | (ids ^ 0x7FFFFFFF)
        pair = tl.where(ids < size, pair, _LOWEST_PAIR)
        best = tl.max(pair, axis=0)
        while best > worst:
            listed = tl.where(listed == worst, best, listed)
            worst = tl.min(listed, axis=0)
            pair = tl.where(pair == best, _LOWEST_PAIR, pair)
            best = tl.max(pair, axis=0)
    listed = tl.where(place < COUNT, listed, _LOWEST_PAIR)
    for turn in range(COUNT):
        best = tl.max(listed, axis=0)
        winner = best.to(tl.int32) ^ 0x7FFFFFFF
        tl.store(out + row * COUNT + turn, tl.where(winner < size, winner, 0).to(tl.int64))
        listed = tl.where(listed == best, _LOWEST_PAIR, listed)


def top_ids(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits of each row, fp32 [rows, vocab] → int64 [rows, count]; lowest id first.

    Where `count` is more than there are, the rest are 0.
    """
    rows, size = logits.shape
    out = logits.new_empty(rows, count, dtype=torch.int64)
    start(
        top_kernel, (rows,), logits, out, size, COUNT=count, WIDTH=padded(count), BLOCK=min(padded(size), TOP_BLOCK),
        warps=SAMPLE_WARPS,
    )  # fmt: skip
    return out
