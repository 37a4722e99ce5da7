"""Where an answer is cut: the earliest of stop id, stop string and length, by position, in a run and across steps."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from specserve.answertext import AnswerText
from specserve.commit import banned_ids, cut, stop_ids
from specserve.events import FinishReason, SpeculationStats
from specserve.metrics import count_step
from specserve.pages import PagePool, PageTable
from specserve.request import Request, SamplingParams, Sequence


class Letters:
    """Token i is the i-th letter of an alphabet; nothing is ever incomplete."""

    def __init__(self, alphabet: str = "abcdefghijklmnopqrstuvwxyz") -> None:
        self.alphabet = alphabet

    def push(self, token_id: int) -> str:
        return self.alphabet[token_id]

    def flush(self) -> str:
        return ""


def sequence(num_output: int = 0, **params: object) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=(1, 2), params=SamplingParams(**params))  # type: ignore[arg-type]
    tokens = [1, 2, *([0] * num_output)]
    return Sequence(request=request, choice=0, seed=0, arrival=0, token_ids=tokens, table=PageTable(PagePool(1, 4)))


def run(text: str, seq: Sequence, eos: tuple[int, ...] = (25,), allowed: int = 99) -> tuple[str, str, object, object]:
    answer = AnswerText(Letters(), seq.request.params)
    ids = [ord(c) - ord("a") for c in text]
    kept = cut(seq, ids, answer, stop_ids(seq.request.params, eos), allowed)
    kept_text = "".join(chr(ord("a") + i) for i in kept.token_ids)
    texts = answer.push_all(kept.token_ids) if kept.texts is None else kept.texts
    tail = "" if isinstance(kept.stop_match, str) else answer.flush()
    return kept_text, "".join(texts) + tail, kept.reason, kept.stop_match


def test_eos_inside_the_run_drops_what_follows() -> None:
    assert run("abzcd", sequence()) == ("abz", "abz", FinishReason.STOP, 25)


def test_ignore_eos_and_stop_token_ids() -> None:
    assert run("azb", sequence(ignore_eos=True))[2] is None
    assert run("azb", sequence(ignore_eos=True, stop_token_ids=(1,))) == ("azb", "azb", FinishReason.STOP, 1)


def test_every_eos_of_the_list_ends() -> None:
    assert run("abc", sequence(), eos=(25, 1))[0] == "ab"


def test_length_and_stop_at_the_same_position_is_a_stop() -> None:
    assert run("abz", sequence(), allowed=3)[2] is FinishReason.STOP
    assert run("abcz", sequence(), allowed=3) == ("abc", "abc", FinishReason.LENGTH, None)


def test_stop_string_over_tokens_cuts_text_before_it_and_ids_at_the_token_that_completes_it() -> None:
    assert run("xxcdeyy", sequence(stop=("cde",))) == ("xxcde", "xx", FinishReason.STOP, "cde")
    assert run("xxcdeyy", sequence(stop=("cde",), include_stop_str_in_output=True))[1] == "xxcde"


def test_the_earliest_stop_wins_whatever_the_order_given() -> None:
    assert run("abcd", sequence(stop=("cd", "b")))[3] == "b"


def test_stop_string_across_steps_is_held_back_until_it_is_decided() -> None:
    seq = sequence(stop=("cdx",))
    answer = AnswerText(Letters(), seq.request.params)
    first = cut(seq, [0, 2, 3], answer, frozenset(), 99)  # a c d
    assert first.texts == ("a", "", "") and first.reason is None
    second = cut(seq, [4], answer, frozenset(), 99)  # e: it was not the stop string
    assert second.texts == ("cde",)
    third = cut(seq, [2, 3, 23, 0], answer, frozenset(), 99)
    assert third.reason is FinishReason.STOP and third.token_ids == (2, 3, 23) and "".join(third.texts) == ""


def test_held_text_comes_out_at_the_end_when_no_stop_claimed_it() -> None:
    assert run("abcd", sequence(stop=("cdx",)), allowed=4) == ("abcd", "abcd", FinishReason.LENGTH, None)


def test_min_tokens_counts_positions_not_steps() -> None:
    seq = sequence(min_tokens=3)
    stops = stop_ids(seq.request.params, (25,))
    assert [banned_ids(seq, 2 + i, stops) for i in range(5)] == [(25,), (25,), (25,), (), ()]
    # a stop string cannot end the answer below min_tokens, and text of those tokens is not part of a match
    assert run("abaaba", sequence(min_tokens=3, stop=("b",)))[0] == "abaab"
    assert run("aab", sequence(min_tokens=3, stop=("b",)))[0] == "aab"


@given(
    text=st.text(alphabet="abc", min_size=1, max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=30),
)
def test_the_cut_does_not_depend_on_how_tokens_fall_into_steps(text: str, stops: list[str], sizes: list[int]) -> None:
    seq = sequence(stop=tuple(stops))
    answer = AnswerText(Letters(), seq.request.params)
    ids = [ord(c) - ord("a") for c in text]
    kept: list[int] = []
    shown = ""
    reason = None
    at = 0
    for size in [*sizes, *([1] * len(ids))]:
        step = cut(seq, ids[at : at + size], answer, frozenset(), 99)
        at += size
        kept += step.token_ids
        shown += "".join(step.texts)
        if step.reason is not None:
            reason = step.stop_match
            break
    # the reference looks at each prefix from scratch
    want_ids, want_text = len(ids), text
    for end in range(1, len(text) + 1):
        hits = [text[:end].find(s) for s in stops if s in text[:end]]
        if hits:
            want_ids, want_text = end, text[: min(hits)]
            break
    assert len(kept) == want_ids
    assert shown + ("" if reason is not None else answer.flush()) == want_text
    assert text.startswith(shown)


def test_counts_per_step_and_position() -> None:
    stats = SpeculationStats()
    count_step(stats, [], 0, 1)
    count_step(stats, [1, 1, 2, 2, 3], 2, 3)
    count_step(stats, [1], 0, 1)
    assert stats.num_steps == 3 and stats.num_drafts == 2 and stats.num_draft_tokens == 6
    assert stats.drafted_per_position == [3, 2, 1] and stats.accepted_per_position == [1, 1, 0]
    assert stats.acceptance_length == pytest.approx(5 / 3)
