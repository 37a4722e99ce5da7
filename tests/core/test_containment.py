"""Promise 4: one request's trouble stays its own. Everything here was broken once; a hash is the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hashlm import HashRunner, continuation
from specserve_kernels import load

import specserve.drawing
import specserve.engine
from specserve.answertext import AnswerText
from specserve.commit import cut
from specserve.config import CacheConfig, EngineConfig, ModelLimits, SchedulerConfig
from specserve.controller import Controller
from specserve.engine import Engine
from specserve.errors import EngineFault, InvalidRequest
from specserve.events import Delta, Event, Failed, Finished, FinishReason
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.request import Request, SamplingParams, SpeculationParams
from specserve.sample import Draw

VOCAB = 24


class Plain:
    def incremental(self) -> Plain:
        return Plain()

    def push(self, token_id: int) -> str:
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


class Fussy:
    """Drafts the last token again; refuses to start for sequences named `bad`."""

    name = "fussy"
    wants_top_ids = False

    def start(self, view: DraftRow) -> None:
        if view.sequence_id.startswith("bad"):
            raise RuntimeError("no")

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        assert not any(row.sequence_id.startswith("bad") for row in rows)
        return [DraftTree.chain([row.token_ids[-1]], self.name) for row in rows]

    def observe(self, view: DraftRow, result: StepResult) -> None: ...

    def stop(self, view: DraftRow) -> None: ...


def engine(num_pages: int = 32, **scheduler: int) -> Engine:
    config = EngineConfig(
        cache=CacheConfig(page_size=4, num_pages=num_pages), scheduler=SchedulerConfig(**scheduler), debug=True
    )
    limits = ModelLimits(
        vocab_size=VOCAB,
        max_model_len=64,
        pool_tokens=4 * num_pages,
        page_size=4,
        max_num_seqs=config.scheduler.max_num_seqs,
        eos_token_ids=(0,),
        drafters=("off", "fussy"),
    )
    runner, controller = HashRunner(num_pages, 4, VOCAB), Controller(config.speculation)
    return Engine(config, limits, runner, load("torch"), Plain(), {"fussy": Fussy()}, controller)


def request(name: str, drafter: str = "off", prompt: Sequence[int] = (1, 2, 3), **params: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | params)),
        speculation=SpeculationParams(drafter=drafter),
    )


def drain(machine: Engine) -> list[Event]:
    events: list[Event] = []
    while machine.has_work():
        events += machine.step()
    return events


def answer(events: Sequence[Event], name: str) -> list[int]:
    return [t.token_id for e in events if isinstance(e, Delta) and e.request_id == name for t in e.tokens]


def test_an_error_while_drawing_for_one_request_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = specserve.drawing.draw_tokens

    def picky(logits: Any, draws: Sequence[Draw], ops: Any) -> list[int]:
        if any(draw.seed == 13 for draw in draws):
            raise ValueError("thirteen")
        return real(logits, draws, ops)

    monkeypatch.setattr(specserve.drawing, "draw_tokens", picky)
    machine = engine()
    machine.submit(request("bad", temperature=0.5, seed=13, top_k=1))
    machine.submit(request("good", temperature=0.5, seed=14, top_k=1))
    events = drain(machine)
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.request_id for event in failed] == ["bad"] and isinstance(failed[0].error, EngineFault)
    assert answer(events, "good") == continuation([1, 2, 3], VOCAB, (), 12)


def test_an_error_while_committing_one_request_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = specserve.engine.commit.cut

    def picky(sequence: Any, *rest: Any) -> Any:
        if sequence.request.request_id == "bad" and sequence.num_output == 3:
            raise KeyError("text")
        return real(sequence, *rest)

    monkeypatch.setattr(specserve.engine.commit, "cut", picky)
    machine = engine()
    machine.submit(request("bad", n=2))
    machine.submit(request("good", drafter="fussy"))
    events = drain(machine)
    assert [event.request_id for event in events if isinstance(event, Failed)] == ["bad"]
    assert answer(events, "good") == continuation([1, 2, 3], VOCAB, (), 12)
    assert machine.pool.num_referenced == 0


def test_a_drafter_that_cannot_start_one_sequence_still_drafts_for_the_others() -> None:
    machine = engine()
    machine.submit(request("bad", drafter="fussy"))
    machine.submit(request("good", drafter="fussy"))
    ends = {event.request_id: event for event in drain(machine) if isinstance(event, Finished)}
    assert ends["good"].speculation.num_drafts > 0
    assert ends["bad"].speculation.num_drafts == 0
    assert "at the start" in str(ends["bad"].speculation.inactive_reason)


def test_inactive_reasons_are_true() -> None:
    machine = engine()
    machine.submit(request("short", drafter="fussy", max_tokens=2))
    machine.submit(request("one", drafter="fussy", max_tokens=1))
    ends = {event.request_id: event.speculation for event in drain(machine) if isinstance(event, Finished)}
    assert "never room" in str(ends["short"].inactive_reason)
    assert "first token" in str(ends["one"].inactive_reason)


def test_an_admission_that_must_wait_flushes_nothing() -> None:
    machine = engine(num_pages=16)
    machine.submit(request("cached", prompt=range(1, 21), max_tokens=1))
    drain(machine)
    cached = machine.pool.num_cached
    assert cached == 5
    machine.submit(request("long", prompt=[7] * 36, max_tokens=20))
    machine.step()
    machine.submit(request("waits", prompt=[9] * 30, max_tokens=2))
    machine.step()
    assert [s.request.request_id for s in machine.scheduler.waiting] == ["waits"]
    assert machine.pool.num_cached >= 4


def test_an_id_with_an_untold_end_is_refused() -> None:
    machine = engine()
    machine.submit(request("same"))
    machine.abort("same")
    with pytest.raises(InvalidRequest, match="in flight"):
        machine.submit(request("same"))
    assert isinstance(machine.step()[0], Failed)
    machine.submit(request("same"))


def test_a_stop_id_ends_by_itself_and_keeps_its_text() -> None:
    machine = engine()
    machine.submit(request("x", stop=("5>",), stop_token_ids=(5,)))
    sequence = machine.scheduler.waiting[0]
    text = AnswerText(Plain(), sequence.request.params)
    kept = cut(sequence, [3, 5, 7], text, frozenset({5}), 9)
    assert (kept.token_ids, "".join(kept.texts), kept.reason) == ((3, 5), "<3><5>", FinishReason.STOP)
    assert kept.stop_match == 5
