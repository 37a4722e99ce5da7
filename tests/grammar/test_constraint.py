"""Grammars as records: limits before anything is compiled; and forced tokens laid over a draft."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.constraint import MAX_GRAMMAR_BYTES, GrammarSpec, grammar_violations, with_forced
from specserve.proposal import EMPTY_TREE, DraftTree


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        (GrammarSpec("json_shema", "{}"), "grammar.kind", "Did you mean 'json_schema'?"),
        (GrammarSpec(5, "{}"), "grammar.kind", "Known"),  # type: ignore[arg-type]
        (GrammarSpec("regex", ""), "grammar.regex", "is empty"),
        (GrammarSpec("regex", ("a",)), "grammar.regex", "is a tuple"),
        (GrammarSpec("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), "grammar.regex", "allowed: 65536"),
        (GrammarSpec("lark", "é" * (MAX_GRAMMAR_BYTES // 2 + 1)), "grammar.lark", "allowed: 65536"),
        (GrammarSpec("json_object", "{}"), "grammar.json_object", "takes no value"),
        (GrammarSpec("regex", "\ud800"), "grammar.regex", "surrogate"),
        (GrammarSpec("choice", "abc"), "grammar.choice", "list of texts"),
        (GrammarSpec("choice", (1, 2)), "grammar.choice", "list of texts"),  # type: ignore[arg-type]
        (GrammarSpec("choice", ()), "grammar.choice", "has 0 choices"),
        (GrammarSpec("choice", ("a", "")), "grammar.choice", "1 to 1024 characters"),
        (GrammarSpec("choice", ("a" * 1025,)), "grammar.choice", "1 to 1024 characters"),
        (GrammarSpec("choice", ("a",) * 1025), "grammar.choice", "has 1025 choices"),
        (GrammarSpec("choice", ("a" * 1000,) * 100), "grammar.choice", "allowed: 65536"),
        (GrammarSpec("choice", ("\udfff",)), "grammar.choice", "surrogate"),
    ],
)
def test_each_limit_is_named(spec: GrammarSpec, field: str, words: str) -> None:
    ((name, description),) = grammar_violations(spec)
    assert name == field
    assert words in description


def test_good_specs_pass_and_hash() -> None:
    specs = [GrammarSpec("json_object"), GrammarSpec("regex", "a*"), GrammarSpec("choice", ["a", "b"])]  # type: ignore[arg-type]
    assert [grammar_violations(spec) for spec in specs] == [[], [], []]
    assert GrammarSpec("choice", ("a", "b")) in set(specs)


def test_forced_come_first_and_the_draft_goes_on() -> None:
    #        root ─ 5 ─ 6 ─ 7
    #             │   └ 9
    #             └ 8
    tree = DraftTree((5, 8, 6, 9, 7), (-1, -1, 0, 0, 2), ("a", "a", "a", "a", "b"))
    merged = with_forced(tree, [5, 6], 8)
    assert merged == DraftTree((5, 6, 7), (-1, 0, 1), ("forced", "forced", "b"))
    assert with_forced(tree, [4], 8) == DraftTree.chain([4], "forced")
    assert with_forced(tree, [5], 3) == DraftTree((5, 6, 9), (-1, 0, 0), ("forced", "a", "a"))
    assert with_forced(tree, [], 2) == tree.prune(2, 9)
    assert with_forced(tree, [5, 6], 1) == DraftTree.chain([5], "forced")
    assert with_forced(tree, [5, 6], 0) == EMPTY_TREE


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    token_ids: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, 12))):
        pair = (draw(st.integers(-1, node - 1)), draw(st.integers(0, 3)))
        while pair in zip(parents, token_ids, strict=True):
            pair = (pair[0], pair[1] + 1)
        parents.append(pair[0])
        token_ids.append(pair[1])
    return DraftTree(tuple(token_ids), tuple(parents), ("d",) * len(parents))


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append(((*found[parent],) if parent >= 0 else ()) + (token_id,))
    return set(found)


@given(trees(), st.lists(st.integers(0, 3), max_size=5), st.integers(0, 20))
def test_a_merged_tree_is_valid_and_holds_what_follows(tree: DraftTree, forced: list[int], cap: int) -> None:
    merged = with_forced(tree, forced, cap)
    assert merged.fault(100) is None
    assert len(merged) <= cap
    chain = tuple(forced[:cap])
    wanted = {path for path in paths(tree) if path[: len(chain)] == chain} | {chain[: i + 1] for i in range(len(chain))}
    assert paths(merged) <= wanted
    if cap >= len(wanted):
        assert paths(merged) == wanted
