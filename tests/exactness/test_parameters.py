"""Every sampling parameter at every row: drafter × greedy or sampled × parameter × situation, against the oracle.

A cell gives its subjects one parameter. Their ids, texts, ends and log-probabilities must be the same with
speculation on and off, and those of the oracle; everybody else must get what he gets alone. A cell also proves that
the parameter did something (another answer than without it, or something told that was not), that the situation
came about, and that drafts of the subjects were accepted and rejected. At the end errors are planted in what a
tree's row counts, and the cells must fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cells import (
    DRAFTERS,
    MODES,
    SITUATIONS,
    OracleAnswers,
    all_pairs,
    cell_params,
    check_drafts,
    compare_logprobs,
    make_drafter,
    pairwise,
    vocab_of,
)
from harness import EngineHarness, Run
from oracle import NearTies

from specserve import drawing
from specserve.processors import History
from specserve.proposal import DraftTree
from specserve.request import Request

WHERE = ("alone", "mates", "preempted", "prefix_hit", "chunked")
STOP_IDS = tuple(range(4, 240, 2))
# few ids, so that a token often comes again within one tree
FEW: dict[str, Any] = {"allowed_token_ids": tuple(range(21, 280, 7))}


@dataclass(frozen=True)
class Parameter:
    """What a subject asks on top of `base`. `changes`: in which modes its answer must differ from base alone."""

    settings: Mapping[str, Any]
    base: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = MODES
    bad_words: bool = False

    def without(self, item: Request) -> Request:
        return replace(item, params=replace(item.params, **self.base))

    def on(self, item: Request, answer: Sequence[int]) -> Request:
        """`answer` is what comes without the parameter; a bad word has to be in it to matter."""
        words: tuple[tuple[int, ...], ...] = ((answer[5], answer[6]), (answer[9],), tuple(answer[10:13]))
        params = replace(item.params, **(dict(self.base) | dict(self.settings)))
        return replace(item, params=params, bad_word_ids=words if self.bad_words else ())


SAMPLED, NEVER = ("sampled",), ()
PARAMETERS: dict[str, Parameter] = {
    "repetition_penalty": Parameter({"repetition_penalty": 1.2}, base=FEW),
    "presence_penalty": Parameter({"presence_penalty": 1.8}, base=FEW),
    "frequency_penalty": Parameter({"frequency_penalty": 1.2}, base=FEW),
    "logit_bias": Parameter({"logit_bias": {t: (3.0 if t % 2 else -2.0) for t in range(5, 260, 5)}}),
    "allowed_token_ids": Parameter({"allowed_token_ids": tuple(range(3, 270, 6))}),
    "bad_words": Parameter({"bad_words": ("in ids",)}, bad_words=True),
    "min_tokens": Parameter({"min_tokens": 37}, base={"stop_token_ids": STOP_IDS}),
    "top_k": Parameter({"top_k": 2}, changes=SAMPLED),
    "top_p": Parameter({"top_p": 0.4}, changes=SAMPLED),
    "min_p": Parameter({"min_p": 0.5}, changes=SAMPLED),
    "logprobs": Parameter({"logprobs": 20}, changes=NEVER),
    "logprob_token_ids": Parameter({"logprobs": 0, "logprob_token_ids": (7, 0, 299)}, changes=NEVER),
    "prompt_logprobs": Parameter({"prompt_logprobs": 5}, changes=NEVER),
    "all": Parameter(
        {
            "repetition_penalty": 1.1,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
            "logit_bias": {9: 1.0, 30: -1.0},
            "allowed_token_ids": tuple(range(3, 290)),
            "bad_words": ("in ids",),
            "min_tokens": 25,
            "top_k": 30,
            "top_p": 0.95,
            "min_p": 0.01,
            "logprobs": 3,
            "logprobs_mode": "processed",
        },
        base={"stop_token_ids": STOP_IDS[:40]},
        bad_words=True,
    ),
}


class Cell(NamedTuple):
    drafter: str
    mode: str
    parameter: str
    situation: str


ALL_CELLS = [Cell(*values) for values in itertools.product(DRAFTERS, MODES, PARAMETERS, WHERE)]
DEFAULT_CELLS = pairwise(ALL_CELLS)


@dataclass
class Scene:
    """A situation with a parameter, run without drafts and found right."""

    requests: list[Request]
    subjects: list[Request]
    plain: list[Request]
    off: Run

    @property
    def by_name(self) -> dict[str, Request]:
        return {item.request_id: item for item in self.requests}


class References:
    """Scenes, each made once, and what stands behind them: the oracle, and every other request alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.oracle = OracleAnswers(folder)
        self.vocab_size = vocab_of(folder)
        self.ties = NearTies()
        self._alone: dict[str, Run] = {}
        self._scenes: dict[tuple[str, str, str], Scene] = {}

    def run(self, requests: list[Request], situation: str, drafter: Any = "off") -> tuple[EngineHarness, Run]:
        scene = SITUATIONS[situation]
        harness = EngineHarness(self.folder, drafter, dtype="float32", num_draft_tokens=8, **scene.options)
        return harness, harness.run(requests, scene.arrivals)

    def scene(self, mode: str, parameter: str, situation: str) -> Scene:
        key = (mode, parameter, situation)
        if key not in self._scenes:
            self._scenes[key] = self._make(*key)
        return self._scenes[key]

    def _make(self, mode: str, parameter: str, situation: str) -> Scene:
        asked, place = PARAMETERS[parameter], SITUATIONS[situation]
        requests, plain = place.requests(mode), []
        for i, item in enumerate(requests):
            if item.request_id in place.subjects:
                plain.append(asked.without(item))
                free = replace(item.params, ignore_eos=True, max_tokens=20)
                hint = self.oracle.of(replace(item, params=free)).token_ids
                requests[i] = asked.on(item, hint)
        subjects = [item for item in requests if item.request_id in place.subjects]
        harness, off = self.run(requests, situation)
        scene = Scene(requests, subjects, plain, off)
        place.claim(harness, off, scene.by_name)
        for item in requests:
            if item in subjects:
                self._check(item, off)
            else:
                self._check_alone(item, off)
        return scene

    def _check(self, item: Request, off: Run) -> None:
        """Speculation off equals the oracle."""
        key = f"{item.request_id}/0"
        expected = self.oracle.of(item, likely=off.answers[key])
        if self.ties.compare(off.answers[key], expected, f"{key} {item.params}"):
            assert off.texts[key] == expected.text
            assert off.finished[key].reason == expected.finish_reason
            compare_logprobs(off, item, 0, expected)

    def _check_alone(self, item: Request, off: Run) -> None:
        """The parameter of a subject is not felt by anybody else."""
        name = repr(item)
        if name not in self._alone:
            harness = EngineHarness(self.folder, dtype="float32", enable_prefix_caching=False)
            self._alone[name] = harness.run([item])
        for key, ids in self._alone[name].answers.items():
            assert off.answers[key] == ids, f"{key} is not what it is alone"


@pytest.fixture(scope="module")
def references(sharp_llama: Path) -> Iterator[References]:
    made = References(sharp_llama)
    yield made
    made.ties.finish()


def told(run: Run) -> dict[str, Any]:
    """All that a client hears of tokens, but not how they fell into steps."""
    told: dict[str, Any] = {name: started.prompt_logprobs for name, started in run.started.items()}
    for key, tokens in run.tokens.items():
        told[key] = [(token.token_id, token.text, token.logprobs) for token in tokens]
        told[f"{key} end"] = (run.finished[key].reason, run.finished[key].stop_match, run.texts[key])
    return told


def check_effect(cell: Cell, scene: Scene, references: References) -> None:
    """The parameter did what it is for."""
    asked = PARAMETERS[cell.parameter]
    before = [references.oracle.of(item) for item in scene.plain]
    after = [references.oracle.of(item) for item in scene.subjects]
    same = [a.token_ids == b.token_ids for a, b in zip(before, after, strict=True)]
    if cell.mode in asked.changes:
        assert not any(same)
    else:
        assert all(same)
    for item, output in zip(scene.subjects, after, strict=True):
        if asked.bad_words:
            ids = output.token_ids
            assert not any(tuple(ids[i : i + len(w)]) == w for w in item.bad_word_ids for i in range(len(ids)))
        if item.params.logprobs is not None:
            assert scene.off.tokens[f"{item.request_id}/0"][0].logprobs is not None
        if item.params.prompt_logprobs is not None:
            assert scene.off.started[item.request_id].prompt_logprobs is not None


def run_cell(cell: Cell, references: References) -> None:
    scene = references.scene(cell.mode, cell.parameter, cell.situation)
    drafter = make_drafter(cell.drafter, scene.off.full(scene.requests), references.vocab_size)
    harness, on = references.run(scene.requests, cell.situation, drafter)
    assert told(on) == told(scene.off), f"on is not off in {cell}"
    SITUATIONS[cell.situation].claim(harness, on, scene.by_name)
    check_effect(cell, scene, references)
    check_drafts(cell.drafter, drafter, on)
    if cell.drafter == "ngram":
        return  # it does not know who is the subject; of the whole run it was right and wrong
    stats = [on.finished[f"{item.request_id}/0"].speculation for item in scene.subjects]
    accepted = sum(s.num_accepted_tokens for s in stats)
    drafted = sum(s.num_draft_tokens for s in stats)
    assert (accepted >= 1) == (cell.drafter != "always_wrong")
    assert (accepted < drafted) == (cell.drafter != "oracle")


@pytest.mark.parametrize("cell", cell_params(ALL_CELLS, DEFAULT_CELLS))
def test_on_equals_off_equals_the_oracle(cell: Cell, references: References) -> None:
    run_cell(cell, references)


def test_the_default_cells_cover_every_pair() -> None:
    assert all_pairs(DEFAULT_CELLS) == all_pairs(ALL_CELLS)
    assert len(ALL_CELLS) == 5 * 2 * len(PARAMETERS) * 5
    assert len(DEFAULT_CELLS) <= 90


# ---- planted errors -------------------------------------------------------------------------------------------------

Wrong = Callable[[DraftTree, int], tuple[int, ...]]
"""(tree, node, or -1 for the root) → the path that the row wrongly counts."""


def own_path(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tree.paths()[node] if node >= 0 else ()


WRONG_PATHS: dict[str, Wrong] = {
    "whole_tree": lambda tree, node: tree.token_ids,
    "previous_row": lambda tree, node: own_path(tree, max(node - 1, -1)),
    "no_path": lambda tree, node: (),
    "last_token_missing": lambda tree, node: own_path(tree, node)[:-1],
    "siblings": lambda tree, node: own_path(tree, node) + siblings(tree, node),
    "last_token_twice": lambda tree, node: own_path(tree, node) + own_path(tree, node)[-1:],
}
# a token that was seen is seen: counting it twice is no error of these; and greedily nothing comes twice in a row
NOT_FELT = {
    ("last_token_twice", "repetition_penalty", "greedy"),
    ("last_token_twice", "repetition_penalty", "sampled"),
    ("last_token_twice", "presence_penalty", "greedy"),
    ("last_token_twice", "presence_penalty", "sampled"),
    ("last_token_missing", "presence_penalty", "greedy"),
}


def siblings(tree: DraftTree, node: int) -> tuple[int, ...]:
    """Ids that stand beside the node, under the same parent."""
    parents = tree.parents
    return tuple(t for i, t in enumerate(tree.token_ids) if node >= 0 and i != node and parents[i] == parents[node])


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
PLANTED = [p for p in itertools.product(WRONG_PATHS, PENALTIES, MODES) if p not in NOT_FELT]
PLANTED += [("no_path", "bad_words", mode) for mode in MODES]
# what a lone cell must catch; a subtler error may take the cells of several situations
GROSS = ("whole_tree", "previous_row", "no_path")


def plant(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processing gets `wrong(tree, node)` for the row's own path; noise and bans of the row stay as they are."""
    mistaken: dict[History, dict[tuple[int, ...], tuple[int, ...]]] = {}
    draws_of, process = drawing._draws_of, History.process

    def watched(span: Any, choice: Any, *rest: Any) -> Any:
        history = choice.history
        if history is not None:
            nodes = range(-1, len(span.tree))
            mistaken[history] = {own_path(span.tree, node): wrong(span.tree, node) for node in nodes}
        return draws_of(span, choice, *rest)

    def planted(self: History, logits: Any, path: Sequence[int], *rest: Any) -> Any:
        return process(self, logits, mistaken[self][tuple(path)], *rest)

    monkeypatch.setattr(drawing, "_draws_of", watched)
    monkeypatch.setattr(History, "process", planted)


def is_caught(cell: Cell, references: References) -> bool:
    try:
        run_cell(cell, references)
    except AssertionError as error:
        assert str(error).startswith("on is not off"), f"caught by something else: {error}"
        return True
    return False


@pytest.mark.parametrize(("error", "parameter", "mode"), PLANTED)
def test_counting_another_branch_is_caught(
    error: str, parameter: str, mode: str, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random trees hold branches whose tokens would change what the others draw."""
    places = ("alone",) if error in GROSS else WHERE
    cells = [Cell("random_tree", mode, parameter, place) for place in places]
    run_cell(cells[0], references)
    plant(WRONG_PATHS[error], monkeypatch)
    assert any(is_caught(cell, references) for cell in cells)


@pytest.mark.parametrize("parameter", PENALTIES)
def test_rejected_drafts_that_stay_counted_are_caught(
    parameter: str, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("random_tree", "greedy", parameter, "alone")
    references.scene(*cell[1:])
    process = History.process

    def planted(self: History, logits: Any, path: Sequence[int], *rest: Any) -> Any:
        out = process(self, logits, path, *rest)
        for token_id in path:
            self._seen.add(token_id)
            self._output.add(token_id)
        return out

    monkeypatch.setattr(History, "process", planted)
    with pytest.raises(AssertionError, match="on is not off"):
        run_cell(cell, references)
