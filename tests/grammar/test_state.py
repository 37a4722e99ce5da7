"""Following a grammar: masks equal brute force, walks leave nothing behind, drafts only get shorter."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest
from grammar.conftest import PADDING, TINY_EOS, Vocab
from grammar.schemas import SCHEMAS, faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from specserve.constraint import GrammarSpec
from specserve.errors import GrammarStuck
from specserve.grammar import Grammar, GrammarCompiler, GrammarState
from specserve.grammar.source import source_of
from specserve.proposal import EMPTY_TREE, DraftTree

PERSON = json.dumps(SCHEMAS["a person"])
KINDS: dict[str, tuple[str, str | tuple[str, ...], tuple[str, ...]]] = {
    "json_schema": ("json_schema", PERSON, ('{"name": "Bob", "age": 7}', '{"name": "", "age": 120}')),
    "json_object": ("json_object", "", ("{}", '{"a": [1, {"b": null}], "": "é"}')),
    "regex": ("regex", "[a-c]{2}(the|world)+", ("abthe", "ccworldthe")),
    "lark": ("lark", 'start: "(" start ")" | "the"', ("the", "((the))")),
    "choice": (
        "choice",
        ("the world", 'say "hi"\n', "日本\t🙂", "a\\b", "\x00"),
        ("the world", 'say "hi"\n', "日本\t🙂"),
    ),
}


def matches(state: GrammarState, vocab: Vocab, text: str, eos: int) -> bool:
    twin = state.fork()
    try:
        twin.accept([*vocab.encode(text), eos])
    except GrammarStuck:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, tiny: Vocab) -> None:
    name, value, good = KINDS[kind]
    state = tiny.start(name, value)
    assert not state.finished
    for text in good:
        assert matches(state, tiny, text, 2), text
        assert matches(state, tiny, text, 0), text
        assert not matches(state, tiny, text[:-1], 2), text
        assert not matches(state, tiny, text + "}", 2), text
    if kind == "choice":
        assert isinstance(value, tuple)
        assert all(matches(state, tiny, text, 2) for text in value)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_equal_brute_force(kind: str, tiny: Vocab) -> None:
    """Every id of the vocabulary, one by one, at every prefix of an answer."""
    name, value, good = KINDS[kind]
    state = tiny.start(name, value)
    for token_id in [*tiny.encode(good[0]), None]:
        expected = {i for i in range(tiny.vocab_size) if accepts(state, i)}
        forced = state.forced(1)
        if forced and forced[0] not in TINY_EOS:  # of one text's spellings, the usual one
            assert forced[0] in expected
            expected = {forced[0]}
        assert tiny.allowed(state) == expected
        assert not expected & set(range(tiny.vocab_size - PADDING, tiny.vocab_size))
        if token_id is not None:
            state.accept([token_id])
    assert set(TINY_EOS) <= tiny.allowed(state)


def accepts(state: GrammarState, token_id: int) -> bool:
    """What `accept` goes by, without the cost of its error."""
    if token_id in TINY_EOS:
        return state._committed.is_accepting()
    return state._consumed(state._committed.deep_copy(), token_id)


def test_the_end(tiny: Vocab) -> None:
    state = tiny.start("regex", "ab?")
    assert not set(TINY_EOS) & tiny.allowed(state)
    with pytest.raises(GrammarStuck, match="before its grammar"):
        state.fork().accept([2])
    state.accept(tiny.encode("a"))
    assert set(TINY_EOS) < tiny.allowed(state)
    assert not state.finished
    state.accept(tiny.encode("b"))
    assert state.finished
    assert tiny.allowed(state) == set(TINY_EOS)
    assert state.forced(3) == [TINY_EOS[0]]
    state.accept([0])
    assert state.finished
    assert tiny.allowed(state) == set(TINY_EOS)
    assert state.forced(3) == []
    state.accept([2])  # ignore_eos goes on drawing it
    with pytest.raises(GrammarStuck):
        state.accept(tiny.encode("b"))


def test_stuck(tiny: Vocab) -> None:
    """A grammar that wants an EOS id inside the answer can be followed to there and no further."""
    vocabulary = tiny.compiler._vocabulary  # the compiler itself refuses this grammar
    source = source_of(GrammarSpec("lark", 'start: "a" <|im_end|> "b"'))
    grammar = Grammar(vocabulary.load(), source, tiny.vocab_size, TINY_EOS)
    state = grammar.start()
    state.accept(tiny.encode("a"))
    with pytest.raises(GrammarStuck) as caught:
        state.masks(EMPTY_TREE)
    assert (caught.value.status, caught.value.reason) == ("FAILED_PRECONDITION", "CONSTRAINT_FAILED")
    before = grammar.start()
    masks = before.masks(DraftTree.chain(tiny.encode("a"), "d"))
    assert masks[0].any()
    assert not masks[1].any()  # the draft is allowed, nothing may follow it; plain decoding fails a step later


@pytest.mark.parametrize("text", ["a", "bab"])
def test_a_row_that_explores_too_much_fails_alone(text: str, tiny: Vocab) -> None:
    """The limit is a count, so the same text fails at the same token every time; the lexer is not blamed for it."""
    source = source_of(GrammarSpec("lark", 'start: e\ne: e e | e e e | "a" | "b"'))
    grammar = Grammar(tiny.compiler._vocabulary.load(), source, tiny.vocab_size, TINY_EOS)
    ends, other, origins = [], grammar.start(), set()
    for _ in range(2):
        state, tokens = grammar.start(), tiny.encode(text) * 200
        with pytest.raises(GrammarStuck):
            for token_id in tokens:
                state.masks(EMPTY_TREE)
                state.accept([token_id])
        ends.append(len(state._history))
        origins.add(id(state._origin))
    assert ends[0] == ends[1] > 10
    assert len(origins) == 1
    other.accept(tiny.encode("ab"))
    assert tiny.allowed(other)


def test_a_thousand_choices(tiny: Vocab) -> None:
    choices = tuple(f"{i} the world {i * 7919 % 1009}" for i in range(1024))
    state = tiny.start("choice", choices)
    assert matches(state, tiny, choices[1000], 2)
    assert not matches(state, tiny, choices[1000] + "0", 2)


def test_a_foreign_token_is_refused(tiny: Vocab) -> None:
    state = tiny.start("regex", "ab")
    for token_id in (-1, tiny.vocab_size, 1 << 40, tiny.vocab_size - 1):
        with pytest.raises(GrammarStuck, match=f"token {token_id}"):
            state.accept([token_id])
    assert state.prune(DraftTree.chain([-1], "d")) == EMPTY_TREE
    state.accept(tiny.encode("ab"))


def test_an_invalid_draft_only_gets_shorter(tiny: Vocab) -> None:
    state = tiny.start("regex", "(ab|ac)d")
    a, b, c, d, e = tiny.encode("a") + tiny.encode("b") + tiny.encode("c") + tiny.encode("d") + tiny.encode("e")
    #           a ─ b ─ d ─ EOS, x      invalid: e at the root, its child, e under a, anything behind EOS
    tree = DraftTree((e, a, b, a, e, d, c, 2, d, d), (-1, -1, 1, 0, 1, 2, 1, 5, 7, 6), tuple("0123456789"))
    pruned = state.prune(tree)
    assert pruned.fault(tiny.vocab_size) is None
    assert pruned == DraftTree((a, b, d, c, 2, d), (-1, 0, 1, 0, 2, 3), tuple("125679"))
    rows = tiny.rows(state, pruned)
    assert rows == [{a}, {b, c}, {d}, set(TINY_EOS), {d}, set(TINY_EOS), set(TINY_EOS)]
    assert np.array_equal(state.fit(tree)[1], state.masks(pruned))
    rows = tiny.rows(state, tree)
    assert [bool(row) for row in rows[1:]] == [False, True, True, False, False, True, True, True, False, True]
    assert state.prune(pruned) is pruned
    assert tiny.allowed(state) == {a}


def test_forced_tokens_are_the_usual_spelling(tiny: Vocab) -> None:
    state = tiny.start("choice", ("the world and the other", "the world and one"))
    usual = tiny.encode("the world and the other")
    forced = state.forced(16)
    assert forced
    assert forced == usual[: len(forced)]
    assert state.forced(1) == usual[:1]
    assert state.forced(0) == []
    assert state.prune(DraftTree.chain(forced, "forced")) == DraftTree.chain(forced, "forced")
    state.accept(tiny.encode("the world and one"))
    assert state.forced(4) == [TINY_EOS[0]]
    whole = tiny.start("json_schema", json.dumps(SCHEMAS["a fixed record"]))
    tokens = whole.forced(200)
    assert tokens[-1] == TINY_EOS[0]
    assert json.loads(tiny.decode(tokens[:-1])) == {"kind": "ping", "version": 1, "ok": True}


def test_forks_are_independent(tiny: Vocab) -> None:
    state = tiny.start("regex", "[ab]c")
    twin = state.fork()
    state.accept(tiny.encode("a"))
    assert tiny.allowed(twin) == set(tiny.encode("a") + tiny.encode("b"))
    assert tiny.allowed(state) == set(tiny.encode("c"))


def replay(vocab: Vocab, kind: str, value: str | tuple[str, ...], token_ids: list[int]) -> GrammarState:
    state = vocab.start(kind, value)
    state.accept(token_ids)
    return state


def random_tree(rng: random.Random, state: GrammarState, vocab: Vocab) -> DraftTree:
    """Mostly allowed tokens, found through forks; some that are not."""
    token_ids: list[int] = []
    parents: list[int] = []
    states: list[GrammarState | None] = []
    for node in range(rng.randint(0, 10)):
        parent = rng.randint(-1, node - 1)
        above = state if parent < 0 else states[parent]
        good = sorted(vocab.allowed(above)) if above is not None else []
        token_id = rng.choice(good) if good and rng.random() < 0.85 else rng.randrange(vocab.vocab_size)
        if (parent, token_id) in zip(parents, token_ids, strict=True):
            token_id = next(
                i for i in range(vocab.vocab_size) if (parent, i) not in zip(parents, token_ids, strict=True)
            )
        token_ids.append(token_id)
        parents.append(parent)
        below = None if above is None else above.fork()
        try:
            if below is not None:
                below.accept([token_id])
                vocab.allowed(below)
        except GrammarStuck:
            below = None
        states.append(below)
    return DraftTree(tuple(token_ids), tuple(parents), ("d",) * len(parents))


LARK = """
start: (item ","? )*
item: WORD | "[" start "]" | %json {"type": "integer", "minimum": -20, "maximum": 1234}
WORD: /[a-z ]{1,6}/ & ~/.*the.*/
"""
WALKED: list[tuple[str, str | tuple[str, ...]]] = [
    *((kind, value) for kind, value, _ in KINDS.values()),
    ("lark", LARK),
    ("regex", "(the |world)*(and|an)? ?[^\\n]{0,9}"),
    ("json_schema", json.dumps(SCHEMAS["an order"])),
    ("json_schema", json.dumps(SCHEMAS["a config"])),
    ("json_schema", json.dumps(SCHEMAS["one of two tools"])),
    ("json_schema", json.dumps({"type": "object", "x-guidance": {"whitespace_flexible": True}})),
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), which=st.sampled_from(WALKED))
def test_any_walk_leaves_the_state_of_a_fresh_replay(
    seed: int, which: tuple[str, str | tuple[str, ...]], tiny: Vocab
) -> None:
    """Drafts of any shape, accepted or not: at every step the masks are those of a state that never saw a draft."""
    rng = random.Random(seed)
    state, history = tiny.start(*which), list[int]()
    for _ in range(rng.randint(1, 8)):
        tree = random_tree(rng, replay(tiny, *which, history), tiny)
        if rng.random() < 0.5:
            tree = state.prune(tree)
        if rng.random() < 0.5:
            chain = DraftTree.chain(state.forced(rng.randint(0, 6)), "forced")
            for row, token_id in zip(tiny.rows(state, chain), chain.token_ids, strict=False):
                assert row == ({token_id} if token_id not in TINY_EOS else set(TINY_EOS))
        rows = tiny.rows(state, tree)
        assert rows[0] == tiny.allowed(replay(tiny, *which, history))
        paths: dict[int, list[int]] = {-1: []}
        for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            paths[node] = [*paths[parent], token_id]
            drawable = parent < 0 or rows[1 + parent]
            drawable = drawable and token_id in rows[1 + parent] and not set(paths[parent]) & set(TINY_EOS)
            try:
                expected = set() if not drawable else tiny.allowed(replay(tiny, *which, [*history, *paths[node]]))
            except GrammarStuck:
                expected = set()
            assert rows[1 + node] == expected, (which, history, paths[node])
        run = rng.choice([path for node, path in paths.items() if node < 0 or rows[1 + node]])
        if rng.random() < 0.3:
            state = state.fork()
        state.accept(run)
        history += run
        if history and history[-1] in TINY_EOS:
            break
        assert tiny.rows(state, EMPTY_TREE)[0] == tiny.allowed(replay(tiny, *which, history))


def test_a_lexer_that_is_full_is_renewed(tiny: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies of a matcher share one lexer. What others explored ends nobody, and changes no mask."""
    expression = "(a|b)*a(a|b){9}(the )?"  # its automaton has a thousand states
    monkeypatch.setattr("specserve.grammar.source.MAX_LEXER_STATES", 300)
    source = tiny_tokenizer()
    compiler = GrammarCompiler(source.to_str(), tiny.vocab_size, TINY_EOS)
    small = Vocab(compiler, tiny.vocab_size, tiny.encode, tiny.decode)
    rng = random.Random(0)
    letters = tiny.encode("a") + tiny.encode("b")
    try:
        idle = small.start("regex", expression)
        lexers = set()
        for _ in range(30):
            state, plain = small.start("regex", expression), tiny.start("regex", expression)
            for _ in range(20):
                tree = DraftTree.chain(rng.choices(letters, k=3), "d")
                rows, expected = small.rows(state, tree), tiny.rows(plain, tree)
                assert rows[0] == expected[0]
                assert all(row in (set(), want) for row, want in zip(rows, expected, strict=True))
                state.accept([tree.token_ids[0]])
                plain.accept([tree.token_ids[0]])
            lexers.add(id(state._origin))
        assert len(lexers) > 1
        assert small.allowed(idle.fork()) == small.allowed(idle) == tiny.allowed(tiny.start("regex", expression))
        idle.accept(tiny.encode("abbbbbbbbb"))
        assert small.allowed(idle) >= set(TINY_EOS)
    finally:
        compiler.close()


@pytest.mark.demo
@pytest.mark.parametrize("name", ["a person", "a config", "one of two tools"])
def test_the_demo_vocabulary_equals_brute_force_on_samples(name: str, demo: Vocab) -> None:
    rng = random.Random(0)
    state = demo.start("json_schema", json.dumps(SCHEMAS[name]))
    for _ in range(12):
        allowed = demo.allowed(state)
        others = rng.sample(range(demo.vocab_size), 200)
        if len(allowed) == 1:
            others = []
        for token_id in {*rng.sample(sorted(allowed), min(50, len(allowed))), *others}:
            if token_id:  # 0 ends answers of the tiny vocabulary only
                assert accepts(state, token_id) == (token_id in allowed)
        token_id = rng.choice(sorted(allowed))
        state.accept([token_id])
        if token_id in (2,):
            break


@pytest.mark.demo
def test_every_schema_can_be_answered_at_random(demo: Vocab) -> None:
    """Random allowed tokens end in an answer that the checker accepts, within a few hundred tokens."""
    rng = random.Random(1)
    for name, schema in SCHEMAS.items():
        state, answer = demo.start("json_schema", json.dumps(schema)), list[int]()
        while len(answer) < 1500:
            allowed = sorted(demo.allowed(state))
            token_id = 2 if 2 in allowed else rng.choice(allowed)
            if token_id == 2:
                break
            state.accept([token_id])
            answer.append(token_id)
        assert not list(faults(json.loads(demo.decode(answer)), schema)), name


def test_the_checker_checks() -> None:
    assert len(SCHEMAS) == 50
    order = {"id": 7, "items": [{"name": "a", "count": 1}], "paid": True}
    assert not list(faults(order, SCHEMAS["an order"]))
    for broken in (
        {**order, "id": 0},
        {**order, "id": True},
        {**order, "items": []},
        {**order, "paid": 1},
        {**order, "more": 1},
        {"id": 7, "paid": True},
        {**order, "items": [{"name": "a" * 13, "count": 1}]},
        [],
    ):
        assert list(faults(broken, SCHEMAS["an order"])), broken
    assert list(faults("2020-1-1", SCHEMAS["a date"]))
    assert list(faults(2, {"const": "2"}))


@pytest.mark.demo
def test_a_row_costs_little(demo: Vocab) -> None:
    """A guard against something quadratic, not a benchmark: 16 rows of a JSON string in well under 50 ms."""
    state = demo.start("json_schema", PERSON)
    text = demo.encode('{"name": "Bob", "age": 42}')
    tree = DraftTree.chain(text, "d")
    state.masks(tree)
    began = time.perf_counter()
    masks = state.masks(tree)
    assert time.perf_counter() - began < 0.05
    assert masks.shape == (1 + len(text), 49152 // 32)
    assert masks.dtype == np.uint32
