"""The controller: overrides win, caps follow what is accepted and what steps cost, and all of it is told."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence as SequenceOf

import pytest
from drafters import AlwaysWrongDrafter, OracleDrafter
from hashlm import HashRunner, continuation
from hypothesis import given
from hypothesis import strategies as st
from specserve_kernels import load

from specserve.config import MAX_NUM_DRAFT_TOKENS, CacheConfig, EngineConfig, ModelLimits, SpeculationConfig
from specserve.controller import DEFAULT_NODES, Controller
from specserve.costs import Drafted, StepCosts, StepLoad
from specserve.engine import Engine
from specserve.events import Delta, Event
from specserve.goodput import Asking, asked_for, best_level, best_prefix
from specserve.pages import PagePool, PageTable
from specserve.proposal import Drafter, DraftTree, StepResult
from specserve.request import Request, SamplingParams, Sequence, SpeculationParams
from specserve.scheduler import PlannedRows
from specserve.survival import LEVELS, Prospect, Track, level_counts, outcome
from specserve.trace import StepTrace, Trace

FLAT = StepCosts(curve=(0.010,) * 65, row=0.0001)
STEEP = StepCosts(curve=tuple(0.010 * max(n, 1) for n in range(65)), row=0.010)
STAIRS = StepCosts(curve=tuple(0.010 + 0.005 * ((max(n, 1) - 1) // 16) for n in range(65)), row=0.0004)


def sequence(name: str = "r", temperature: float = 0.0, **speculation: object) -> Sequence:
    request = Request(
        request_id=name,
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(temperature=temperature),
        speculation=SpeculationParams(**speculation),  # type: ignore[arg-type]
    )
    return Sequence(
        request=request, choice=0, seed=0, arrival=0, token_ids=[1, 2, 3, 4], table=PageTable(PagePool(1, 16))
    )


def plans_of(sequences: SequenceOf[Sequence], caps: SequenceOf[int]) -> list[PlannedRows]:
    return [
        PlannedRows(sequence=s, num_pending=1, draws=True, node_cap=cap, max_depth=99)
        for s, cap in zip(sequences, caps, strict=True)
    ]


def chain(cap: int, survival: float | None = None) -> DraftTree:
    estimates = () if survival is None else [survival ** (i + 1) for i in range(cap)]
    return DraftTree.chain(range(10, 10 + cap), "x", estimates)


class Rig:
    """Steps of a controller whose sequences have chains of which so many nodes are right."""

    def __init__(self, costs: StepCosts, num_sequences: int, survival: float | None = None) -> None:
        self.controller = Controller(SpeculationConfig(drafter="ngram"), costs)
        self.sequences = [sequence(str(i)) for i in range(num_sequences)]
        self.survival = survival
        self.caps: list[int] = []
        self.trees: list[DraftTree] = []

    def step(self, right: int | SequenceOf[int]) -> int:
        """Returns the nodes verified."""
        rights = [right] * len(self.sequences) if isinstance(right, int) else right
        self.caps = self.controller.budgets(self.sequences, 0)
        proposed = [chain(cap, self.survival) for cap in self.caps]
        plans = plans_of(self.sequences, self.caps)
        self.trees = self.controller.trim(plans, proposed)
        for one, tree, cap, n in zip(self.sequences, self.trees, self.caps, rights, strict=True):
            if cap:
                path = tuple(range(min(n, len(tree))))
                self.controller.learn(one, StepResult(tree, path, (0,) * (1 + len(path))))
        return sum(map(len, self.trees))

    def replace(self) -> None:
        for one in self.sequences:
            self.controller.forget(one)
        self.sequences = [sequence(one.request.request_id) for one in self.sequences]


# ---- overrides


@pytest.mark.parametrize("costs", [None, FLAT, STEEP])
def test_what_a_request_fixed_is_neither_capped_nor_trimmed(costs: StepCosts | None) -> None:
    controller = Controller(SpeculationConfig(drafter="ngram"), costs)
    sequences = [sequence("a", num_draft_tokens=9), sequence("b", drafter="off"), sequence("c", num_draft_tokens=0)]
    for _ in range(50):
        caps = controller.budgets(sequences, 0)
        assert caps == [9, 0, 0]
        trees = [chain(cap, 0.01) for cap in caps]
        assert controller.trim(plans_of(sequences, caps), trees) == trees
        controller.learn(sequences[0], StepResult(trees[0], (), (0,)))


def test_what_the_engine_fixed_holds_unless_a_request_says_otherwise() -> None:
    controller = Controller(SpeculationConfig(drafter="ngram", num_draft_tokens=3), FLAT)
    assert controller.budgets([sequence("a"), sequence("b", num_draft_tokens=7)], 0) == [3, 7]


def test_without_costs_every_tree_has_the_default_and_stays_whole() -> None:
    controller = Controller(SpeculationConfig(drafter="ngram"))
    one = sequence()
    assert controller.budgets([one], 0) == [DEFAULT_NODES]
    tree = chain(DEFAULT_NODES, 0.001)
    assert controller.trim(plans_of([one], [DEFAULT_NODES]), [tree]) == [tree]


def test_forced_nodes_are_kept() -> None:
    controller = Controller(SpeculationConfig(drafter="ngram"), STEEP)
    one = sequence()
    controller.budgets([one], 0)
    tree = DraftTree((7, 8), (-1, 0), ("forced", "x"))
    assert controller.trim(plans_of([one], [4]), [tree]) == [tree]


# ---- following


def test_full_acceptance_grows_and_full_rejection_goes_to_zero_and_stays() -> None:
    rig = Rig(FLAT, 1)
    for _ in range(80):
        rig.step(right=99)
    assert rig.caps == [MAX_NUM_DRAFT_TOKENS]
    rig = Rig(STAIRS, 16)
    nodes = [rig.step(right=0) for _ in range(400)]
    assert sum(nodes[:20]) > 0 and sum(1 for n in nodes[20:] if n) <= 0.02 * 380


def test_one_that_rejects_does_not_cost_the_others_their_drafts() -> None:
    rig = Rig(STAIRS, 4)
    for _ in range(100):
        rig.step(right=[9, 0, 9, 9])
    assert rig.caps[1] == 0 or len(rig.trees[1]) == 0
    assert min(len(rig.trees[i]) for i in (0, 2, 3)) >= 3


def test_a_steep_machine_drafts_only_what_is_nearly_sure() -> None:
    rig = Rig(STEEP, 4, survival=0.5)
    counts = [rig.step(right=i % 2) for i in range(60)]
    assert sum(counts[-40:]) <= 4


def test_acceptance_that_comes_back_is_found_by_probes() -> None:
    rig = Rig(STAIRS, 16)
    for _ in range(300):
        rig.step(right=0)
    rig.replace()
    counts = [rig.step(right=9) for _ in range(400)]
    assert sum(counts[-50:]) >= 50 * 8


def test_probes_are_rare_and_ask_for_little() -> None:
    rig = Rig(STAIRS, 16)
    for _ in range(100):
        rig.step(right=0)
    asked = [sum(1 for cap in rig.caps if cap) for _ in range(2000) for _ in [rig.step(right=0)]]
    assert 0 < sum(1 for n in asked if n) <= 20, "at most one step in a hundred"
    assert max(asked) == 1


def test_drafting_returns_at_once_when_load_falls() -> None:
    """What was learned of acceptance is not forgotten while a loaded machine drafts nothing."""
    crowd = StepCosts(curve=tuple(0.010 if n <= 16 else 0.010 * (n - 15) for n in range(65)), row=0.010)
    rig = Rig(crowd, 16)
    assert sum(rig.step(right=2) > 0 for _ in range(200)) <= 6
    few = rig.sequences[:2]
    everyone, rig.sequences = rig.sequences, few
    assert rig.step(right=2) > 0
    rig.sequences = everyone
    rig.step(right=2)
    assert sum(map(len, rig.trees)) == 0


def test_equal_inputs_give_equal_choices() -> None:
    def run() -> list[list[int]]:
        rig, rng = Rig(STAIRS, 8), random.Random(3)
        told = []
        for _ in range(200):
            rig.step(right=[rng.randrange(4) for _ in range(8)])
            rig.controller.measured(StepLoad(8, sum(map(len, rig.trees))), rng.uniform(0.01, 0.02), {})
            told.append([*rig.caps, *map(len, rig.trees)])
        return told

    assert run() == run()


def test_dear_drafting_is_not_asked_for() -> None:
    cheap, dear = Rig(FLAT, 1), Rig(FLAT, 1)
    for rig, seconds in ((cheap, 0.0001), (dear, 0.2)):
        for _ in range(100):
            num_nodes = rig.step(right=2)
            drafting = {"ngram": Drafted(1, 0, 0, seconds)} if rig.caps[0] else {}
            rig.controller.measured(StepLoad(1, num_nodes, num_accepted=min(2, num_nodes)), 0.010, drafting)
    assert cheap.caps[0] > 0 and dear.caps[0] == 0


# ---- trimming


@given(st.data())
def test_trimmed_trees_are_whole_and_hold_the_best_nodes(data: st.DataObject) -> None:
    controller = Controller(SpeculationConfig(drafter="ngram"), STAIRS)
    sequences = [sequence(str(i)) for i in range(data.draw(st.integers(1, 4)))]
    controller.budgets(sequences, 0)
    trees = []
    for _ in sequences:
        parents, survivals = [], []
        for i in range(data.draw(st.integers(0, 12))):
            parent = data.draw(st.integers(-1, i - 1))
            parents.append(parent)
            survivals.append(data.draw(st.floats(0.0, 1.0)) * (survivals[parent] if parent >= 0 else 1.0))
        trees.append(DraftTree(tuple(range(len(parents))), tuple(parents), ("x",) * len(parents), tuple(survivals)))
    kept = controller.trim(plans_of(sequences, [64] * len(sequences)), trees)
    worst = min((s for tree in kept for s in tree.survival), default=1.0)
    for before, after in zip(trees, kept, strict=True):
        assert after.fault(99) is None
        left = sorted(before.survival, reverse=True)[len(after) :]
        assert all(value <= worst + 1e-9 for value in left)


def test_the_best_prefix_is_found_across_a_stair() -> None:
    """Sixteen rows are full; a further one pays only if so many follow that the stair is worth climbing."""
    rate = 100.0  # a stair of 5 ms costs half a token
    assert sum(best_prefix([0.3], 16, rate, STAIRS)) == 0
    assert sum(best_prefix([0.3] * 8, 16, rate, STAIRS)) == 8
    assert best_prefix([0.1, 0.4, 0.3], 13, rate, STAIRS) == [True, True, True]
    assert best_prefix([0.1, 0.4, 0.3], 14, rate, STAIRS) == [False, True, True]


@given(st.lists(st.floats(0.0, 1.0), max_size=20), st.integers(1, 30), st.floats(1.0, 400.0))
def test_no_prefix_gains_more_than_the_best(worths: list[float], num_rows: int, rate: float) -> None:
    kept = best_prefix(worths, num_rows, rate, STAIRS)
    chosen = sum(worth for worth, keep in zip(worths, kept, strict=True) if keep)
    gain = chosen - rate * (STAIRS.rows(num_rows + sum(kept)) - STAIRS.rows(num_rows))
    best = sorted(worths, reverse=True)
    others = [
        sum(best[:n]) - rate * (STAIRS.rows(num_rows + n) - STAIRS.rows(num_rows)) for n in range(len(worths) + 1)
    ]
    assert gain == pytest.approx(max(others), abs=1e-9)


@given(
    st.lists(st.lists(st.floats(0.0, 2.0), min_size=len(LEVELS), max_size=len(LEVELS)), min_size=1, max_size=4),
    st.integers(4, 40),
)
def test_the_chosen_level_reaches_the_highest_rate(counts: list[list[float]], num_sequences: int) -> None:
    load, asking = StepLoad(num_sequences), Asking(trees=0.0005, node=0.0001, most_nodes=30.0)
    choice = best_level(counts, load, STAIRS, asking, extra=0.00001)

    def rate(level: int) -> float:
        by_level = [sum(column) for column in zip(*counts, strict=True)][: level + 1]
        nodes = sum(by_level)
        accepted = sum(n * survival for n, survival in zip(by_level, LEVELS, strict=False))
        drafting = 0.0005 + 0.0001 * min(asked_for(nodes, len(counts)), 30.0)
        return (num_sequences + accepted) / (STAIRS.rows(num_sequences + nodes) + drafting + nodes * 0.00001)

    rates = [rate(level) for level in range(len(LEVELS))]
    plain = num_sequences / STAIRS.seconds(load)
    if choice.level < 0:
        assert all(value <= plain * 1.01 + 1e-9 for value in rates)
    else:
        assert rate(choice.level) == pytest.approx(max(rates)) and choice.rate > plain
        assert choice.nodes == pytest.approx(sum(map(choice.wanted, counts)))


# ---- survival


def test_outcomes_count_only_what_was_put_to_the_test() -> None:
    tree = DraftTree((1, 2, 3, 4, 5), (-1, -1, 0, 1, 2), ("x",) * 5, (0.6, 0.3, 0.3, 0.2, 0.1))
    seen = outcome(tree, (0, 2))
    assert (seen.first, seen.deeper) == (1.0, 1.0)
    assert seen.first_estimate == pytest.approx(0.9)
    assert seen.deeper_estimate == pytest.approx(0.3 / 0.6 + 0.1 / 0.3)
    assert outcome(tree, ()).deeper_estimate == 0.0


@pytest.mark.parametrize("estimate", [0.3, 0.6, 0.9, None])
def test_estimates_are_corrected_towards_what_happens(estimate: float | None) -> None:
    """Chains of which each node holds 7 of 10 times, whatever their drafter thought."""
    rng, shared = random.Random(1), Prospect()
    track = Track("x", None, False, shared, 0)
    tree = chain(6, estimate)
    for _ in range(600):
        track.prospect.survival(tree)
        right = 0
        while right < 6 and rng.random() < 0.7:
            right += 1
        track.learn(outcome(tree, tuple(range(right))))
    told = track.prospect.survival(tree)
    assert told[0] == pytest.approx(0.7, abs=0.15)
    assert told[2] == pytest.approx(0.7**3, abs=0.15)
    assert shared.survival(tree)[0] == pytest.approx(0.7, abs=0.08)


@given(st.floats(0.0, 3.0), st.floats(0.0, 3.0), st.data())
def test_corrected_survival_never_exceeds_the_parents(first: float, deeper: float, data: st.DataObject) -> None:
    prospect = Prospect()
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(data.draw(st.integers(1, 10)))]
    estimates: list[float] = []
    for parent in parents:
        estimates.append(data.draw(st.floats(0.0, 1.0)) * (estimates[parent] if parent >= 0 else 1.0))
    for survival in (tuple(estimates), ()):
        tree = DraftTree(tuple(range(len(parents))), tuple(parents), ("x",) * len(parents), survival)
        prospect.survival(tree)  # the first tree settles what the drafter is like
        prospect.first, prospect.deeper = first, deeper
        told = prospect.survival(tree)
        assert all(0.0 <= v <= (told[p] if p >= 0 else 1.0) for v, p in zip(told, parents, strict=True))
        level_counts(told)


# ---- what is told


def test_a_sequence_that_got_nothing_is_told_why_with_figures() -> None:
    rig = Rig(STEEP, 3)
    for _ in range(60):
        rig.step(right=0)
    rig.replace()
    rig.step(right=0)
    idle = next(one for one, cap in zip(rig.sequences, rig.caps, strict=True) if not cap)
    idle.stats.num_steps = 5
    told = rig.controller.inactive_reason(idle)
    assert "3 rows a step take 3.0 times as long as one" in told
    assert "% of drafts beginning right none pays" in told


def test_predictions_are_those_of_the_scaled_machine() -> None:
    controller = Controller(SpeculationConfig(drafter="ngram"), FLAT)
    load = StepLoad(2, 3)
    for _ in range(40):
        told = controller.measured(load, 0.030, {})
    assert told == pytest.approx(0.030) and controller.scale == pytest.approx(3.0)
    assert controller.measured(StepLoad(1, num_prompt_rows=9), 9.0, {}) == pytest.approx(0.030), "prompts tell nothing"
    assert controller.scale == pytest.approx(3.0)


# ---- in the engine


class Text:
    def incremental(self) -> Text:
        return self

    def push(self, token_id: int) -> str:
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


VOCAB = 50


def serve(drafter: Drafter, requests: SequenceOf[Request], costs: StepCosts | None) -> tuple[Engine, list[Event]]:
    """All requests at once on a hash model, on a clock of which every look takes a millisecond."""
    config = EngineConfig(cache=CacheConfig(page_size=4, num_pages=256), debug=True)
    limits = ModelLimits(
        vocab_size=VOCAB,
        max_model_len=256,
        pool_tokens=1024,
        page_size=4,
        max_num_seqs=config.scheduler.max_num_seqs,
        eos_token_ids=(0,),
        drafters=("off", "auto"),
    )
    ticks = itertools.count()
    engine = Engine(
        config,
        limits,
        HashRunner(256, 4, VOCAB),
        load("torch"),
        Text(),
        {"auto": drafter},
        Controller(config.speculation, costs),
        clock=lambda: 0.001 * next(ticks),
    )
    for request in requests:
        engine.submit(request)
    events: list[Event] = []
    while engine.has_work():
        events += engine.step()
    return engine, events


def requests_of(count: int) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    return [Request(request_id=f"r{i}", prompt_token_ids=(1 + i, 2, 3), params=params) for i in range(count)]


@pytest.mark.parametrize("costs", [FLAT, STEEP, STAIRS], ids=["flat", "steep", "stairs"])
@pytest.mark.parametrize("right", [True, False])
def test_whatever_is_chosen_answers_are_those_of_plain_decoding(costs: StepCosts, right: bool) -> None:
    requests = requests_of(6)
    answers = {r.request_id: continuation(r.prompt_token_ids, VOCAB, (), 60) for r in requests}
    full = {f"{r.request_id}/0": [*r.prompt_token_ids, *answers[r.request_id]] for r in requests}
    drafter = OracleDrafter(full) if right else AlwaysWrongDrafter(full, VOCAB)
    engine, events = serve(drafter, requests, costs)
    for request in requests:
        told = [
            t.token_id for e in events if isinstance(e, Delta) and e.request_id == request.request_id for t in e.tokens
        ]
        assert told == answers[request.request_id]
    stats = engine.metrics.speculation
    assert (stats.acceptance_length > 2.0) == (right and costs is not STEEP)
    if not right:
        assert drafter.num_observes < 0.9 * stats.num_steps, "a drafter that is not asked hears nothing"


def test_the_trace_holds_what_was_chosen_and_what_came_of_it() -> None:
    requests = requests_of(3)
    full = {
        f"{r.request_id}/0": [*r.prompt_token_ids, *continuation(r.prompt_token_ids, VOCAB, (), 60)] for r in requests
    }
    engine, _ = serve(OracleDrafter(full), requests, FLAT)
    lines = [json.loads(line) for line in engine.drafting.trace.json_lines()]
    assert [line["step"] for line in lines] == list(range(engine.metrics.num_forwards))
    stats = engine.metrics.speculation
    assert sum(line["num_nodes"] for line in lines) == stats.num_draft_tokens
    assert sum(line["num_accepted"] for line in lines) == stats.num_accepted_tokens
    assert sum(line["num_sequences"] for line in lines) == stats.num_steps
    assert all(line["num_proposed"] >= line["num_nodes"] and line["seconds"] > 0 for line in lines)
    drafting = [line for line in lines if line["num_nodes"]]
    assert drafting and all(max(line["caps"]) > 0 and line["draft_seconds"] > 0 for line in drafting)
    assert drafting[-1]["predicted_seconds"] > 0


def test_a_trace_keeps_the_last_steps() -> None:
    trace = Trace(kept=2)
    for n in range(5):
        trace.add(StepTrace(n, 0, 0, (), 0, 0, 0, 0.0, 0.0, 0.0, 1.0))
    assert [json.loads(line)["step"] for line in trace.json_lines()] == [3, 4]
    assert [step.num_sequences for step in trace.steps] == [3, 4]
