"""A costly part of `auto` is asked while it pays, rests while it does not, and is tried again."""

from __future__ import annotations

from itertools import pairwise

import pytest
from driving import VOCAB, row
from specserve_drafts.auto import AutoDrafter
from specserve_drafts.payback import LONGEST_REST, REST, TRIAL, WINDOW, Asked, Payback
from specserve_drafts.recycling import RecyclingDrafter

from specserve.proposal import DraftRow, DraftTree, StepResult

PAYS = Asked(tokens=3, seconds=0.020, own_tokens=1, own_seconds=0.002)
COSTS = Asked(tokens=3, seconds=0.020, own_tokens=0, own_seconds=0.002)


def ask(payback: Payback, asked: Asked, num_steps: int) -> list[int]:
    """The steps in which it was asked."""
    found = []
    for step in range(num_steps):
        if payback.asks():
            found.append(step)
            payback.count(asked)
    return found


def test_what_pays_is_asked_always() -> None:
    payback = Payback()
    assert ask(payback, PAYS, 500) == list(range(500))
    assert payback.gain == pytest.approx((3 / 0.020) / (2 / 0.018)) and not payback.rests


def test_what_costs_rests_longer_each_time() -> None:
    payback = Payback()
    asked = ask(payback, COSTS, 40_000)
    starts = [step for step, before in zip(asked, [-2, *asked], strict=False) if step != before + 1]
    trial = asked.index(starts[1])
    assert 3 <= trial < TRIAL, "no luck explains that it brings nothing"
    pauses = [later - earlier - trial for earlier, later in pairwise(starts)]
    assert pauses[:3] == [REST - 1, 2 * REST - 1, 4 * REST - 1] and max(pauses) == LONGEST_REST - 1
    assert len(asked) / 40_000 < 0.01


def test_what_begins_to_pay_is_found_and_what_ceases_to_is_dropped() -> None:
    payback = Payback()
    num_tried = len(ask(payback, COSTS, TRIAL))
    assert payback.rests
    assert ask(payback, PAYS, REST + WINDOW)[0] == REST - 1 - TRIAL + num_tried and not payback.rests
    ask(payback, COSTS, WINDOW)
    assert payback.rests
    ask(payback, PAYS, REST - 1)
    assert not payback.asks() or not payback.rests, "after it has paid, the first rest is short again"


class Head:
    """Named like a model drafter; guesses 7, takes `seconds` of the clock's time."""

    name = "eagle"
    wants_top_ids = False

    def __init__(self, seconds: float, first: float = 0.0) -> None:
        self.seconds, self.first, self.now, self.num_asked = seconds, first, 0.0, 0

    def start(self, view: DraftRow) -> None: ...

    def stop(self, view: DraftRow) -> None: ...

    def observe(self, view: DraftRow, result: StepResult) -> None: ...

    def propose(self, rows: list[DraftRow], caps: list[int]) -> list[DraftTree]:
        self.now += self.seconds if self.num_asked else self.seconds + self.first
        self.num_asked += 1
        return [DraftTree((7,), (-1,), ("eagle",), (0.5,))] * len(rows)


@pytest.mark.parametrize(
    ("seconds", "first", "right", "always"),
    [(0.001, 0.0, True, True), (0.001, 9.0, True, True), (0.001, 0.0, False, False), (0.030, 0.0, True, False)],
)
def test_auto_asks_a_head_by_what_it_brings(seconds: float, first: float, right: bool, always: bool) -> None:
    head = Head(seconds, first)
    auto = AutoDrafter([head, RecyclingDrafter()], VOCAB, clock=lambda: head.now)
    tokens = [1, 2, 3]
    auto.start(row(tokens, 3))
    for _ in range(100):
        [tree] = auto.propose([row(tokens, 3)], [4])
        head.now += 0.020
        path = (tree.token_ids.index(7),) if right and 7 in tree.token_ids else ()
        kept = (*(tree.token_ids[node] for node in path), len(tokens) % 5 + 10)
        tokens += kept
        auto.observe(row(tokens, 3), StepResult(tree, path, kept, [-1] * (1 + len(tree)), ()))
    assert head.num_asked == 100 if always else head.num_asked <= TRIAL + 1


def test_what_recycling_says_too_is_no_merit_of_the_head() -> None:
    recycling = RecyclingDrafter()
    auto = AutoDrafter([Head(0.001), recycling], VOCAB)
    auto.start(row([1, 2, 3], 3))
    assert auto.propose([row([1, 2, 3], 3)], [4])[0].drafters == ("eagle",)
    recycling.observe(row([1, 2, 3, 9], 3), StepResult(DraftTree(), (), (9,), [9], [[7, 8]]))
    [tree] = auto.propose([row([1, 2, 3], 3)], [4])
    assert set(zip(tree.token_ids, tree.drafters, strict=True)) == {(7, "recycling"), (8, "recycling")}
