"""Recycling: what it keeps of whom and how long, its trees, what it learns, and what it reads of a prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import MODES, SITUATIONS, request
from driving import row
from harness import EngineHarness, sharpen
from hypothesis import given
from hypothesis import strategies as st
from specserve_drafts import make_drafter, recycling
from specserve_drafts.recycling import Ranks, RecyclingDrafter, Tables
from specserve_drafts.successors import Successors, pair_of
from tiny import TinyLlama

from specserve.config import SpeculationConfig
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.verify import walk

VOCAB = 40


class Language:
    """A target whose eight best depend on the last two tokens, and which draws the `rank`-th of them."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def top_ids(self, previous: int, token_id: int) -> list[int]:
        return random.Random(previous * VOCAB + token_id).sample(range(VOCAB), 8)

    def step(self, drafter: RecyclingDrafter, tokens: list[int], cap: int, **fields: Any) -> tuple[DraftTree, int]:
        """One step of a sequence of two prompt tokens: its tree, and how many of its nodes were accepted."""
        (tree,) = drafter.propose([row(tokens, 2, **fields)], [cap])
        assert tree.fault(VOCAB) is None and len(tree) <= cap
        above = [tokens[-1], *tree.token_ids]
        contexts = [tuple(tokens[-2:]), *((above[1 + p], t) for p, t in zip(tree.parents, tree.token_ids, strict=True))]
        tops = [self.top_ids(*context) for context in contexts]
        drawn = [top[self.rank] for top in tops]
        path, bonus = walk(tree, drawn)
        kept = (*(tree.token_ids[node] for node in path), bonus)
        tokens += kept
        drafter.observe(row(tokens, 2, **fields), StepResult(tree, path, kept, drawn, tops))
        return tree, len(path)

    def serve(self, drafter: RecyclingDrafter, num_tokens: int, cap: int = 15, **fields: Any) -> float:
        """Acceptance length of one answer."""
        tokens, steps = [1, 2, 3], 0
        drafter.start(row(tokens, 2, **fields))
        while len(tokens) < num_tokens:
            self.step(drafter, tokens, cap, **fields)
            steps += 1
        drafter.stop(row(tokens, 2, **fields))
        return (len(tokens) - 3) / steps


# ---- trees ----------------------------------------------------------------------------------------------------------


def told(drafter: RecyclingDrafter, tokens: Sequence[int], ids: Sequence[int], **fields: Any) -> None:
    """The target thought of these ids after the last token, and drew another one."""
    view = row([*tokens, VOCAB - 1], 2, **fields)
    drafter.observe(view, StepResult(DraftTree(), (), (VOCAB - 1,), [VOCAB - 1], [ids]))


def best_of(drafter: RecyclingDrafter, tokens: Sequence[int], **fields: Any) -> list[int]:
    """The first level of the tree for a sequence that ends so, best first."""
    (tree,) = drafter.propose([row(tokens, 2, **fields)], [64])
    return [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent < 0]


def test_a_pair_goes_before_its_token_and_own_knowledge_before_what_was_shipped() -> None:
    singles, pairs, after_pairs = torch.full((VOCAB, 3), -1), torch.tensor([[4, 5], [3, 5]]), torch.tensor([[8], [9]])
    singles[5] = torch.tensor([6, 7, -1])
    drafter = RecyclingDrafter(shipped=Successors(singles, pairs, after_pairs))

    def best(*tokens: int, name: str = "s/0") -> list[int]:
        return best_of(drafter, tokens, salt="a", name=name)

    def tell(*tokens: int, name: str = "s/0") -> None:
        *context, successor = tokens
        told(drafter, context, [successor], salt="a", name=name)

    assert (best(4, 5), best(2, 5), best(4, 6)) == ([8], [6, 7], [])
    tell(4, 5, 10, name="other")
    tell(2, 5, 11, name="other")
    tell(2, 6, 12, name="other")
    assert (best(4, 5), best(1, 5), best(0, 6)) == ([8], [6, 7], [12]), "another's comes after what was shipped"
    assert best(2, 5) == [11], "a pair, if only another's, comes before a token"
    tell(1, 5, 13)
    tell(4, 5, 14)
    assert (best(4, 5), best(0, 5), best(1, 5), best(3, 5)) == ([14], [14], [13], [9]), "its own comes first of all"


def test_rejected_rows_are_learned_from_and_the_accepted_path_has_the_last_word() -> None:
    drafter = RecyclingDrafter()
    drafter.start(row([1, 2], 2))
    tree = DraftTree((5, 9, 5), (-1, 0, 1), ("recycling",) * 3)
    tops = [[5, 30], [20, 31], [21, 32], [22, 33]]
    result = StepResult(tree, (0,), (5, 20), [5, 20, -1, -1], tops)
    drafter.observe(row([1, 2, 5, 20], 2), result)
    assert best_of(drafter, [1, 2]) == [5, 30]
    assert best_of(drafter, [2, 5]) == [20, 31]
    assert best_of(drafter, [5, 9]) == [21, 32]
    assert best_of(drafter, [9, 5]) == [22, 33]
    assert best_of(drafter, [0, 5]) == [20, 31], "of node 0, which was accepted, though node 2 has the same token"


def test_a_familiar_language_is_guessed_by_its_best_and_learned_when_it_is_not() -> None:
    for rank in (0, 3):
        drafter = RecyclingDrafter()
        first, again = (Language(rank).serve(drafter, 120, salt="a", name=name) for name in ("x", "y"))
        assert again > 1.5 * first and again > 7
        drafter.start(row([1, 2], 2, salt="a"))
        (tree,) = drafter.propose([row([1, 2, 3], 2, salt="a")], [1])
        assert tree.token_ids == (Language().top_ids(2, 3)[rank],), "the rank that comes true is the likeliest"
        assert tree.survival[0] > 0.8


def test_greedy_and_sampled_sequences_are_judged_apart() -> None:
    drafter = RecyclingDrafter()
    for temperature, rank in ((0.0, 0), (0.9, 5)):
        for name in ("x", "y"):
            Language(rank).serve(drafter, 120, salt="a", name=name, temperature=temperature)
    for temperature, rank in ((0.0, 0), (0.9, 5)):
        (tree,) = drafter.propose([row([1, 2, 3], 2, salt="a", temperature=temperature)], [1])
        assert tree.token_ids == (Language().top_ids(2, 3)[rank],)


def test_estimates_agree_with_outcomes() -> None:
    drafter, tokens, rng = RecyclingDrafter(), [1, 2, 3], random.Random(4)
    language = Language()
    drafter.start(row(tokens, 2, salt="a"))
    claimed = accepted = 0.0
    for i in range(600):
        language.rank = min(int(rng.expovariate(0.7)), 7)
        tree, length = language.step(drafter, tokens, 8, salt="a")
        if i >= 300:
            claimed += sum(tree.survival)
            accepted += length
    assert 0.8 * accepted < claimed < 1.25 * accepted


# ---- whose, and how much --------------------------------------------------------------------------------------------


def test_one_salt_never_sees_another_and_without_one_nothing_outlives_a_sequence() -> None:
    drafter, cold = RecyclingDrafter(), RecyclingDrafter()
    Language().serve(drafter, 200, name="x", salt="a")
    Language().serve(drafter, 200, name="n")
    for fields in ({"salt": "b"}, {"salt": ""}):
        fresh = row([1, 2, 3], 2, name="y", **fields)
        drafter.start(fresh)
        cold.start(fresh)
        assert drafter.propose([fresh], [15]) == cold.propose([fresh], [15]) == [DraftTree()]
    assert len(drafter.propose([row([1, 2, 3], 2, name="z", salt="a")], [15])[0]) == 15


def test_a_sequence_leaves_nothing_behind() -> None:
    drafter = RecyclingDrafter()
    Language().serve(drafter, 60, name="n")
    drafter.stop(row([1], 1, name="never seen"))
    for salt in ("", "a"):  # one that ended before anything was seen of it
        drafter.start(row([1, 2, 3], 2, salt=salt))
        drafter.propose([row([1, 2, 3], 2, salt=salt)], [5])
        drafter.stop(row([1, 2, 3], 2, salt=salt))
    assert len(drafter.tables) == 0 and drafter.tables.num_entries == 0 and drafter._unread == {}


@given(
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=60),
    most=st.integers(2, 12),
)
def test_tables_are_bounded_together_and_forget_the_oldest_of_who_was_away_longest(
    steps: list[tuple[str, int, int, bool]], most: int
) -> None:
    tables = Tables(most)
    known: dict[str, dict[tuple[int, ...], int]] = {}  # by tenant, the longest away first; contexts, oldest first
    for tenant, previous, token_id, leaves in steps:
        if leaves:
            tables.drop(tenant)
            known.pop(tenant, None)
            continue
        tables.of(tenant).put(previous, token_id, [1], "s")
        tables.grown(tenant)
        mine = known.pop(tenant, {})
        for context in ((token_id,), (previous, token_id)):
            mine.pop(context, None)
            mine[context] = 1
        known[tenant] = mine
        while sum(map(len, known.values())) > most:
            oldest = next(iter(known))
            del known[oldest][next(iter(known[oldest]))]
            if not known[oldest]:
                del known[oldest]
        assert len(tables) == len(known)
        assert tables.num_entries == sum(map(len, known.values())) <= most
    for tenant, contexts in known.items():
        codes = {c[0] if len(c) == 1 else pair_of(*c) for c in contexts}
        assert set(tables.of(tenant).entries) == codes


def test_old_counts_fade() -> None:
    ranks = Ranks()
    for _ in range(3000):
        ranks.count("kind", [1, 2], 1)
    for _ in range(3000):
        ranks.count("kind", [1, 2], 2)
    first, second, *_ = ranks.chances("kind")
    assert second > 0.6 > 0.4 > first


# ---- prompt rows ----------------------------------------------------------------------------------------------------


class FakeForward:
    """A target whose hidden state is its slot, and whose best after a slot are the ids from the slot's number on."""

    page_size = 4
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.wanted: list[bool] = []
        self.broken = False
        self.decoder = self.ops = self.kept = self

    def keep(self, *, hidden: bool) -> None:
        self.wanted.append(hidden)

    def hidden(self, slots: torch.Tensor) -> torch.Tensor:
        if self.broken:
            raise RuntimeError("no hidden states today")
        self.asked.append(slots.tolist())
        return slots[:, None].expand(-1, VOCAB)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def top_ids(self, logits: torch.Tensor, count: int) -> torch.Tensor:
        return logits[:, :1] + torch.arange(count)


def reading(**fields: Any) -> tuple[FakeForward, RecyclingDrafter, DraftRow]:
    forward: Any = FakeForward()
    view = row([5, 6, 5, 7, 6, 8, 9], 6, pages=[3, 1], **fields)
    return forward, RecyclingDrafter(forward), view


def test_a_prompt_is_read_at_its_last_occurrence_of_each_token_that_is_new() -> None:
    forward, drafter, view = reading(salt="a")
    assert forward.wanted == [True]
    drafter.tables.of("a").put(1, 7, [30], "earlier")
    drafter.start(view)
    assert forward.asked == [], "nothing is computed before somebody wants a tree"
    drafter.propose([view], [5])
    assert forward.asked == [[5, 4, 14]], "slots of positions 5, 4, 2; what stands last comes first"
    entries = drafter.tables.of("a").entries
    assert entries[6].ids == entries[pair_of(7, 6)].ids == list(range(4, 12))
    assert entries[5].ids == entries[pair_of(6, 5)].ids == list(range(14, 22))
    assert entries[7].ids == [30]
    drafter.propose([view], [5])
    again = view._replace(sequence_id="later")
    drafter.start(again)
    drafter.propose([again], [5])
    assert len(forward.asked) == 1, "what is known is not read again"


def test_reading_is_spread_over_steps_and_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycling, "MAX_READ_A_STEP", 3)
    forward, drafter, view = reading()
    rows = [view, view._replace(sequence_id="other", pages=[4, 2])]
    for each in rows:
        drafter.start(each)
    for _ in range(4):
        drafter.propose(rows, [5, 5])
    assert forward.asked == [[5, 4, 15], [14, 9, 8], [19, 18]]
    monkeypatch.setattr(recycling, "MAX_READ", 1)
    short = view._replace(sequence_id="short")
    drafter.start(short)
    drafter.propose([short], [5])
    drafter.propose([short], [5])
    assert forward.asked[3:] == [[5]], "the end of a long prompt"


def test_rows_that_cannot_be_read_are_not_asked_for_again() -> None:
    forward, drafter, view = reading()
    drafter.start(view)
    forward.broken = True
    with pytest.raises(RuntimeError):
        drafter.propose([view], [5])
    forward.broken = False
    assert drafter.propose([view], [5]) == [DraftTree()] and forward.asked == []


def test_a_prompt_is_not_read_where_something_was_shipped() -> None:
    forward: Any = FakeForward()
    drafter = RecyclingDrafter(forward, Successors(torch.full((VOCAB, 1), 3)))
    view = row([5, 6, 5, 7, 6, 8, 9], 6, pages=[3, 1])
    drafter.start(view)
    drafter.propose([view], [5])
    assert forward.wanted == [] and forward.asked == []


# ---- in the engine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(tiny_llama(tied=False, hidden=64), tmp_path_factory.mktemp("recycling") / "llama")


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_on_equals_off(folder: Path, situation: str, mode: str) -> None:
    made = SITUATIONS[situation]
    requests = made.requests(mode)
    options = {"num_draft_tokens": 9, **made.options}
    off = EngineHarness(folder, **options).run(requests, made.arrivals)
    harness = EngineHarness(folder, "recycling", **options)
    on = harness.run(requests, made.arrivals)
    assert on.answers == off.answers
    made.claim(harness, on, {item.request_id: item for item in requests})
    assert harness.engine.metrics.num_drafter_faults == 0
    told = [end.speculation for end in on.finished.values()]
    assert sum(s.num_draft_tokens for s in told) > sum(s.num_accepted_tokens for s in told) > 0


def test_what_is_read_of_a_prompt_is_what_the_target_thought_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[int, list[int]] = {}  # first successors seen of each token
    put = recycling.Table.put

    def watched(self: Any, previous: int, token_id: int, ids: Sequence[int], owner: str) -> None:
        read.setdefault(token_id, list(ids))
        put(self, previous, token_id, ids, owner)

    monkeypatch.setattr(recycling.Table, "put", watched)
    asked = request("r", "greedy", tuple(range(30, 60)), max_tokens=4, prompt_logprobs=8)
    run = EngineHarness(folder, "recycling", num_draft_tokens=5).run([asked])
    reported = run.started["r"].prompt_logprobs
    assert reported is not None
    for token_id, told in zip(range(30, 59), reported[1:], strict=True):
        assert told is not None and read[token_id] == list(told.top_ids)


def test_hidden_states_are_kept_only_where_prompts_are_read(folder: Path) -> None:
    def keeps(drafter: str) -> bool:
        runner: Any = EngineHarness(folder, drafter).engine._runner
        return runner.kept._hidden is not None

    assert [keeps(name) for name in ("off", "ngram", "suffix", "recycling", "auto")] == [False] * 3 + [True] * 2


def test_without_a_target_it_learns_from_answers_alone() -> None:
    drafter: Any = make_drafter("recycling", SpeculationConfig(), None)
    assert Language().serve(drafter, 200) > 1.5
