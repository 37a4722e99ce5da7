"""The start-up sweep: what it says of a machine whose costs are known, under stalls, and when it cannot be done."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hashlm import HashRunner
from specserve_kernels import load

from specserve.batch import StepBatch
from specserve.config import CacheConfig, EngineConfig, ModelLimits, SpeculationConfig
from specserve.controller import Controller
from specserve.costs import StepCosts
from specserve.engine import Engine
from specserve.proposal import Drafter
from specserve.runner import ForwardResult, Runner
from specserve.sweep import DRAFTER, ROWS, measure, settled

VOCAB, PAGES, PAGE_SIZE = 40, 512, 4


class Text:
    def incremental(self) -> Text:
        return self

    def push(self, token_id: int) -> str:
        return "x"

    def flush(self) -> str:
        return ""


class Machine(HashRunner):
    """A hash for a model, on a clock that only its forwards move: a stair each 16 rows, and attention."""

    def __init__(self) -> None:
        super().__init__(PAGES, PAGE_SIZE, VOCAB)
        self.now = 0.0
        self.forwards = 0
        self.slow_from = self.slow_to = -1
        self.stalls_every = 0

    def rows(self, num_rows: int) -> float:
        return 0.010 + 0.004 * ((num_rows - 1) // 16) + 0.00005 * num_rows

    def forward(self, batch: StepBatch) -> ForwardResult:
        self.forwards += 1
        seen = batch.attention.prefix_len.tolist()
        seconds = self.rows(batch.num_rows) + 1e-6 * max(seen) + 1e-7 * (sum(seen) - max(seen))
        if self.slow_from <= self.forwards < self.slow_to:
            seconds *= 1.6
        if self.stalls_every and self.forwards % self.stalls_every == 0:
            seconds += 0.030
        self.now += seconds
        return super().forward(batch)

    def clock(self) -> float:
        return self.now


def sweep(machine: Machine, max_model_len: int = 1024, pool_tokens: int = PAGES * PAGE_SIZE) -> StepCosts | None:
    config = EngineConfig(
        cache=CacheConfig(page_size=PAGE_SIZE, num_pages=PAGES, enable_prefix_caching=False),
        speculation=SpeculationConfig(drafter="off"),
    )
    limits = ModelLimits(
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        pool_tokens=pool_tokens,
        page_size=PAGE_SIZE,
        max_num_seqs=32,
        eos_token_ids=(0,),
        drafters=("off", DRAFTER),
    )

    def make_engine(runner: Runner, drafters: Mapping[str, Drafter]) -> Engine:
        controller = Controller(config.speculation)
        return Engine(config, limits, runner, load("torch"), Text(), drafters, controller, clock=machine.clock)

    return measure(machine, make_engine, limits, machine.clock)


@pytest.mark.parametrize("trouble", ["none", "slow for a while", "stalls"])
def test_costs_are_found(trouble: str) -> None:
    machine = Machine()
    if trouble == "slow for a while":
        machine.slow_from, machine.slow_to = 30, 60
    elif trouble == "stalls":
        machine.stalls_every = 23
    costs = sweep(machine)
    assert costs is not None
    for rows in ROWS:
        assert costs.curve[rows] == pytest.approx(machine.rows(rows), rel=0.02)
    assert costs.rows(40) == pytest.approx(machine.rows(40), rel=0.05)
    assert costs.context == pytest.approx(1e-6, rel=0.3)
    assert costs.node_context == pytest.approx(1e-7, rel=0.3)
    assert costs.row > 0.0
    assert (costs.sampled, costs.accepted, costs.sequence) == (0.0, 0.0, 0.0), "this machine's Python takes no time"


def test_it_takes_no_longer_than_it_may() -> None:
    machine = Machine()
    assert sweep(machine) is not None
    assert machine.now <= 2.5


@pytest.mark.parametrize(("max_model_len", "pool_tokens"), [(128, PAGES * PAGE_SIZE), (1024, 128)])
def test_short_contexts_are_not_measured(max_model_len: int, pool_tokens: int) -> None:
    machine = Machine()
    assert sweep(machine, max_model_len, pool_tokens) is None
    assert machine.forwards == 0


def test_a_model_whose_rows_fail_is_not_measured() -> None:
    machine = Machine()
    machine.fault_on = set(range(VOCAB))
    assert sweep(machine) is None


def test_turns_are_brought_to_one_speed() -> None:
    turns = [{"a": 1.0, "b": 2.0, "c": 4.0}, {"a": 2.0, "b": 4.0, "c": 8.0}, {"a": 1.0, "b": 9.0, "c": 4.0}]
    assert settled(turns) == pytest.approx({"a": 1.0, "b": 2.0, "c": 4.0})
