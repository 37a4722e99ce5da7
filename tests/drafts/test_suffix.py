"""The suffix drafter: its index against brute force, its trees, what it learns, and whose text it may use."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from cells import mates, prompt, request
from driving import drive, row
from harness import EngineHarness, sharpen
from hypothesis import given
from hypothesis import strategies as st
from specserve_drafts import make_drafter
from specserve_drafts.occurrences import LONGEST, SEPARATOR, OwnText, Text
from specserve_drafts.pasts import ENDLESS, MAX_DEPTH, Past, grow
from specserve_drafts.record import Record
from specserve_drafts.suffix import PastAnswers, SuffixDrafter
from tiny import TinyLlama

from specserve.config import SpeculationConfig
from specserve.proposal import DraftTree

tokens_of_three = st.lists(st.integers(0, 2), max_size=60)


# ---- where the present occurred before ------------------------------------------------------------------------------


def match_len(text: Sequence[int], end: int, tail: Sequence[int]) -> int:
    length = 0
    while length < min(LONGEST, end, len(tail)) and text[end - 1 - length] == tail[-1 - length]:
        length += 1
    return length


def every_match(text: Sequence[int], tail: Sequence[int], least: int = 1) -> dict[int, int]:
    """What `occurrences` must find without a limit: each place that a token follows, and how long it matches."""
    lengths = {end: match_len(text, end, tail) for end in range(1, len(text))}
    return {end: length for end, length in lengths.items() if length >= least}


@given(parts=st.lists(tokens_of_three, max_size=4), tail=tokens_of_three)
def test_all_occurrences_are_found_with_their_true_lengths(parts: list[list[int]], tail: list[int]) -> None:
    text = Text()
    for part in parts:
        text.extend(part)
    assert text.tokens == [token for part in parts for token in part]
    assert dict(text.occurrences(tail, 1000)) == every_match(text.tokens, tail)
    assert dict(text.occurrences(text.tokens, 1000)) == every_match(text.tokens, text.tokens)


@given(text=tokens_of_three, tail=tokens_of_three)
def test_without_single_tokens_only_longer_matches_are_found(text: list[int], tail: list[int]) -> None:
    indexed = Text((4, 2))
    indexed.extend(text)
    assert dict(indexed.occurrences(tail, 1000)) == every_match(text, tail, least=2)


@given(text=tokens_of_three, tail=tokens_of_three, limit=st.integers(1, 4))
def test_a_limit_keeps_long_matches_and_of_equal_ones_the_latest(text: list[int], tail: list[int], limit: int) -> None:
    def rank(match: tuple[int, int]) -> tuple[int, int]:
        end, length = match
        return max(size for size in (4, 2, 1) if size <= length), end

    indexed = Text()
    indexed.extend(text)
    best = sorted(every_match(text, tail).items(), key=rank, reverse=True)
    assert indexed.occurrences(tail, limit) == best[:limit]


@given(text=tokens_of_three, drops=st.lists(st.integers(0, 20), max_size=3), more=tokens_of_three, tail=tokens_of_three)
def test_what_was_dropped_is_as_if_it_never_was(
    text: list[int], drops: list[int], more: list[int], tail: list[int]
) -> None:
    dropped = Text()
    dropped.extend(text)
    left = text
    for count in drops:
        count = min(count, len(left))
        dropped.drop(count)
        left = left[count:]
    dropped.extend(more)
    fresh = Text()
    fresh.extend([*left, *more])
    assert dropped.tokens == fresh.tokens
    assert dropped.occurrences(tail, 1000) == fresh.occurrences(tail, 1000)
    assert all(
        set(d.latest) <= set(f.latest) | {SEPARATOR} for d, f in zip(dropped._chains, fresh._chains, strict=True)
    )


@given(steps=st.lists(tokens_of_three.filter(bool), min_size=1, max_size=4), limit=st.integers(1, 9))
def test_a_growing_text_finds_in_itself_what_its_index_would(steps: list[list[int]], limit: int) -> None:
    own, indexed, tokens = OwnText(), Text(), list[int]()
    for step in steps:
        tokens += step
        indexed.extend(step)
        assert own.occurrences(tokens, limit) == indexed.occurrences(tokens, limit)


# ---- the tree -------------------------------------------------------------------------------------------------------


def pasts_of(*continuations: Sequence[int], length: int = 3) -> list[Past]:
    return [Past([*tokens, SEPARATOR], 0, ENDLESS, length, 1.0, 1) for tokens in continuations]


def guessed(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return dict(zip(tree.paths(), tree.survival, strict=True))


@given(
    continuations=st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=8),
    lengths=st.lists(st.integers(1, LONGEST), min_size=8, max_size=8),
    cap=st.integers(1, 80),
)
def test_trees_hold_what_the_pasts_say_best_first(continuations: list[list[int]], lengths: list[int], cap: int) -> None:
    pasts = [
        Past([*tokens, SEPARATOR], 0, ENDLESS, length, 1.0, 1)
        for tokens, length in zip(continuations, lengths, strict=False)
    ]
    tree = grow(pasts, cap, Record(), True, "suffix").tree
    assert tree.fault(4) is None and len(tree) <= cap
    assert len(tree.survival) == len(tree) and list(tree.survival) == sorted(tree.survival, reverse=True)
    said = {tuple(tokens[:n]) for tokens in continuations for n in range(1, len(tokens) + 1)}
    assert set(tree.paths()) <= said
    whole = grow(pasts, 1000, Record(), True, "suffix").tree
    assert (tree.token_ids, tree.parents) == (whole.token_ids[:cap], whole.parents[:cap])


def test_the_more_frequent_continuation_comes_first_and_both_come() -> None:
    chances = guessed(grow(pasts_of([5, 6], [7, 8], [5, 9]), 8, Record(), True, "suffix").tree)
    assert chances[5,] > chances[7,] > 0
    assert chances[5, 6] == pytest.approx(chances[5, 9])


def test_longer_matches_weigh_more_than_many_short_ones() -> None:
    pasts = pasts_of([5], length=12) + pasts_of([7], [7], [7], length=1)
    chances = guessed(grow(pasts, 8, Record(), True, "suffix").tree)
    assert chances[5,] > chances[7,]


def test_a_loop_goes_round_as_often_as_there_is_room() -> None:
    (tree,) = _first_draft([1, 2, 3] * 4, cap=MAX_DEPTH)
    assert tree.paths()[-1] == tuple([1, 2, 3] * 21 + [1])


def _first_draft(tokens: list[int], cap: int, drafter: SuffixDrafter | None = None, salt: str = "") -> list[DraftTree]:
    drafter = drafter or SuffixDrafter()
    drafter.start(row(tokens, 1, salt=salt))
    return drafter.propose([row(tokens, 1, salt=salt)], [cap])


def test_nothing_is_guessed_from_nothing() -> None:
    assert _first_draft([1, 2, 3, 4], cap=8) == [DraftTree()]


def test_no_tree_is_deeper_than_its_votes_reach() -> None:
    (tree,) = _first_draft([1] * 200, cap=500)
    assert max(tree.depths()) == MAX_DEPTH


# ---- what it learns -------------------------------------------------------------------------------------------------


def noisy_text(seed: int, share: float, length: int = 400) -> list[int]:
    """A phrase of distinct tokens again and again; each token is another one with chance 1 - share."""
    rng = random.Random(seed)
    return [100 + i % 12 if rng.random() < share else rng.randrange(12) for i in range(length)]


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_survival_is_what_survives(share: float) -> None:
    drafter, nodes = SuffixDrafter(), []
    for seed in range(30):
        steps = drive(drafter, [1, 2], noisy_text(seed, share), cap=12)
        if seed >= 10:
            nodes += [(value, i in step.path) for step in steps for i, value in enumerate(step.tree.survival)]
    assert len(nodes) > 1000
    for low in (0.0, 0.25, 0.5, 0.75):
        inside = [(value, hit) for value, hit in nodes if low <= value < low + 0.25]
        if len(inside) >= 300:
            mean = sum(value for value, _ in inside) / len(inside)
            assert abs(mean - sum(hit for _, hit in inside) / len(inside)) < 0.1, f"from {low} on"


def test_greedy_and_drawn_answers_are_judged_apart() -> None:
    drafter = SuffixDrafter()
    for _ in range(30):  # greedy answers that never go on after three matching tokens
        drive(drafter, [1, 2, 3, 4], [1, 2, 3, 9], cap=1)
    text = [1, 2, 3, 4, 1, 2, 3]
    drafter.start(row(text, 1))
    (greedy,) = drafter.propose([row(text, 1)], [1])
    (drawn,) = drafter.propose([row(text, 1, temperature=1.0)], [1])
    assert greedy.token_ids == drawn.token_ids == (4,)
    assert greedy.survival[0] < 0.3 < 0.5 < drawn.survival[0]


# ---- answers of others ----------------------------------------------------------------------------------------------

ANSWER = list(range(10, 30))


def served(salt: str, drafter: SuffixDrafter | None = None) -> SuffixDrafter:
    drafter = drafter or SuffixDrafter()
    drive(drafter, [1, 2, 3], ANSWER, salt=salt)
    return drafter


def test_an_answer_helps_the_next_of_its_salt() -> None:
    first, second = SuffixDrafter(), served("a")
    alone = drive(first, [7, 8, 3], ANSWER, salt="a")
    helped = drive(second, [7, 8, 3], ANSWER, salt="a")
    assert len(alone) == len(ANSWER) - 1 and len(helped) < len(alone) / 2


@pytest.mark.parametrize(("stored", "asked"), [("a", "b"), ("a", ""), ("", "a"), ("", "")])
def test_no_salt_sees_another_s_answers(stored: str, asked: str) -> None:
    steps = drive(served(stored), [1, 2, 3], ANSWER, salt=asked)
    assert all(step.tree == DraftTree() for step in steps)


def test_without_a_salt_nothing_is_kept() -> None:
    assert served("").answers.num_tokens == 0


def test_an_answer_is_stored_without_its_prompt() -> None:
    text = served("a").answers.of("a")
    assert text is not None and text.tokens == [1, 2, 3, *ANSWER, SEPARATOR]
    drafter = SuffixDrafter()
    drive(drafter, list(range(500, 600)), ANSWER, salt="a")
    text = drafter.answers.of("a")
    assert text is not None and text.tokens == [596, 597, 598, 599, *ANSWER, SEPARATOR]


@given(
    adds=st.lists(
        st.tuples(st.sampled_from("abcde"), st.lists(st.integers(0, 5), min_size=1, max_size=12)), max_size=20
    )
)
def test_the_store_is_bounded_and_forgets_the_oldest(adds: list[tuple[str, list[int]]]) -> None:
    store = PastAnswers(max_tokens=40, max_salts=3)
    kept: list[tuple[str, list[int]]] = []
    for salt, tokens in adds:
        store.add(salt, tokens)
        kept.append((salt, [*tokens, SEPARATOR]))
        while sum(len(t) for _, t in kept) > 40 or len({s for s, _ in kept}) > 3:
            kept.pop(0)
        texts = {s: [token for owner, t in kept if owner == s for token in t] for s, _ in kept}
        assert {s: text.tokens for s in "abcde" if (text := store.of(s)) is not None} == texts
        assert store.num_tokens == sum(map(len, texts.values())) <= 40


def test_one_answer_never_exceeds_the_store() -> None:
    store = PastAnswers(max_tokens=10)
    store.add("a", range(100))
    text = store.of("a")
    assert text is not None and text.tokens == [*range(91, 100), SEPARATOR]


def test_the_end_of_an_answer_leads_into_no_other() -> None:
    drafter = served("a", served("a"))
    tokens = [500, *ANSWER[-6:]]
    drafter.start(row(tokens, 1, salt="a"))
    assert drafter.propose([row(tokens, 1, salt="a")], [8]) == [DraftTree()]


def test_a_sequence_leaves_nothing_behind_but_its_answer() -> None:
    drafter = served("")
    assert drafter._texts == {} and drafter._drafts == {}
    drafter.stop(row([1, 2], 1, name="never seen", salt="a"))
    assert drafter.answers.of("a") is None


# ---- in the engine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(tiny_llama(tied=False, hidden=64), tmp_path_factory.mktemp("suffix") / "llama")


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("nodes", [5, 64])
def test_no_token_changes_and_a_second_run_is_shorter(folder: Path, mode: str, nodes: int) -> None:
    def requests(run: str) -> list:
        asked = [request("target", mode, prompt(1, 40)), *mates(mode)]
        return [
            type(item)(
                request_id=f"{run}-{item.request_id}",
                prompt_token_ids=item.prompt_token_ids,
                params=item.params,
                cache_salt="local",
            )
            for item in asked
        ]

    off = EngineHarness(folder).run(requests("x"))
    drafter = make_drafter("suffix", SpeculationConfig(), None)
    harness = EngineHarness(folder, drafter, num_draft_tokens=nodes)
    first, second = harness.run(requests("x")), harness.run(requests("y"))
    assert first.answers == off.answers
    assert {key.replace("y-", "x-"): ids for key, ids in second.answers.items()} == off.answers

    def steps(run) -> int:
        return sum(end.speculation.num_steps for end in run.finished.values())

    assert steps(second) < 0.6 * steps(first) <= 0.6 * steps(off)
