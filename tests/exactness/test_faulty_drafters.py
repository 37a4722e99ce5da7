"""A drafter that raises, answers nonsense or miscounts loses its drafts; the request does not notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from drafters import Answers, CountingDrafter, InvalidTreeDrafter, OracleDrafter, RaisingDrafter, WrongCountDrafter
from harness import EngineHarness

from specserve.models.decoder import DecoderConfig
from specserve.proposal import DraftRow, DraftTree
from specserve.request import Request, SamplingParams


class GreedyForRoom(CountingDrafter):
    """Proposes the truth, and three nodes more than it may."""

    name = "greedy_for_room"

    def draft(self, row: DraftRow, cap: int) -> DraftTree:
        truth = list(self.truth(row)[:cap])
        return DraftTree.chain([*truth, *[0] * (cap + 3 - len(truth))], self.name)


class OneBroken(CountingDrafter):
    """Sound for every row but the second, whose tree is broken."""

    name = "one_broken"

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        trees = super().propose(rows, caps)
        if len(trees) > 1:
            trees[1] = DraftTree((0, 0), (-1, -1), (self.name,) * 2)
        return trees

    def draft(self, row: DraftRow, cap: int) -> DraftTree:
        return DraftTree.chain(self.truth(row)[:cap], self.name)


Maker = Callable[[Answers, int], CountingDrafter]
FAULTY: Mapping[str, Maker] = {
    "raising": lambda answers, vocab: RaisingDrafter(OracleDrafter(answers), period=3),
    "invalid_tree": InvalidTreeDrafter,
    "wrong_count": lambda answers, vocab: WrongCountDrafter(answers),
    "one_broken": lambda answers, vocab: OneBroken(answers),
}


def requests() -> list[Request]:
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=tuple(range(5 + i, 20 + 3 * i)),
            params=SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=30, ignore_eos=True),
        )
        for i in range(3)
    ]


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_drafter_costs_only_its_drafts(name: str, sharp_llama: Path) -> None:
    off = EngineHarness(sharp_llama).run(requests())
    vocab_size = DecoderConfig.from_folder(sharp_llama).vocab_size
    drafter = FAULTY[name](off.full(requests()), vocab_size)
    harness = EngineHarness(sharp_llama, drafter)
    on = harness.run(requests(), may_fail=True)
    assert not on.failed, [str(failed.error) for failed in on.failed.values()]
    assert on.answers == off.answers
    assert harness.engine.metrics.num_drafter_faults >= 1
    reasons = [end.speculation.inactive_reason for end in on.finished.values()]
    assert any(reason is not None and "drafter 'ngram'" in reason for reason in reasons)
    # the sound ones among its drafts still counted
    accepted = sum(end.speculation.num_accepted_tokens for end in on.finished.values())
    assert (accepted > 0) == (name != "wrong_count")
    assert drafter.num_stops >= 1


def test_nodes_past_the_cap_are_cut_not_refused(sharp_llama: Path) -> None:
    off = EngineHarness(sharp_llama).run(requests())
    harness = EngineHarness(sharp_llama, GreedyForRoom(off.full(requests())), num_draft_tokens=4)
    on = harness.run(requests())
    assert on.answers == off.answers
    assert harness.engine.metrics.num_drafter_faults == 0
    for end in on.finished.values():
        assert len(end.speculation.drafted_per_position) <= 4
        assert end.speculation.num_accepted_tokens > 0
