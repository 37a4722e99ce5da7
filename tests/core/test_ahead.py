"""Who waits for whom: on a device that computes by itself a step is launched before the last one's text is made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hashlm import HashRunner, HashTreeDrafter, continuation
from specserve_kernels import load

from specserve.batch import StepBatch
from specserve.config import CacheConfig, EngineConfig, ModelLimits
from specserve.controller import Controller
from specserve.engine import Engine
from specserve.errors import Cancelled, EngineFault
from specserve.events import Delta, Event, Failed, Finished
from specserve.request import Request, SamplingParams, SpeculationParams
from specserve.runner import ForwardResult

VOCAB = 24
PAGES = 16


class Stand:
    """An engine over a hash as its model. `log`: what was done, in order; `cursed`: a token without a text."""

    def __init__(self, ahead: bool, cursed: int = -1) -> None:
        self.log: list[str] = []
        self.runner = HashRunner(PAGES, 4, VOCAB)
        self._cursed = cursed
        limits = ModelLimits(
            vocab_size=VOCAB,
            max_model_len=40,
            pool_tokens=4 * PAGES,
            page_size=4,
            max_num_seqs=4,
            eos_token_ids=(),
            drafters=("off", "hashtree"),
        )
        config = EngineConfig(cache=CacheConfig(page_size=4, num_pages=PAGES), debug=True)
        drafters = {"hashtree": HashTreeDrafter(1, VOCAB, 0.7)}
        controller = Controller(config.speculation)
        launch = self._launch if ahead else None
        self.engine = Engine(
            config, limits, self.runner, load("torch"), self, drafters, controller, lambda: 0.0, launch
        )
        forward = self.runner.forward

        def logged(batch: StepBatch) -> ForwardResult:
            self.log.append("forward")
            return forward(batch)

        self.runner.forward = logged  # type: ignore[method-assign]

    def _launch(self, batch: StepBatch) -> Callable[[], ForwardResult]:
        return self.runner.launch(batch)

    def submit(self, name: str, drafter: str = "off", max_tokens: int = 8, n: int = 1, start: int = 1) -> Request:
        request = Request(
            request_id=name,
            prompt_token_ids=(start, 2, 3),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n, seed=1),
            speculation=SpeculationParams(drafter=drafter, num_draft_tokens=4),
        )
        self.engine.submit(request)
        return request

    def run(self) -> list[Event]:
        events: list[Event] = []
        while self.engine.has_work():
            events += self.engine.step()
        return events

    # the tokenizer

    def incremental(self) -> Stand:
        return self

    def push(self, token_id: int) -> str:
        self.log.append("text")
        if token_id == self._cursed:
            raise ValueError("no text")
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


def expected(request: Request) -> list[int]:
    return continuation(request.prompt_token_ids, VOCAB, (), request.params.max_tokens or 0)


def told(events: list[Event], name: str) -> list[int]:
    return [t.token_id for e in events if isinstance(e, Delta) and e.request_id == name for t in e.tokens]


def test_text_is_made_while_the_next_forward_runs() -> None:
    ahead, in_order = Stand(ahead=True), Stand(ahead=False)
    for stand in (ahead, in_order):
        request = stand.submit("r", max_tokens=4)
        assert told(stand.run(), "r") == expected(request)
    assert in_order.log == ["forward", "text"] * 4
    assert ahead.log == ["forward", "forward", "text", "forward", "text", "forward", "text", "text"]


@pytest.mark.parametrize("drafter", ["off", "hashtree"])
def test_answers_are_the_same(drafter: str) -> None:
    found = []
    for ahead in (True, False):
        stand = Stand(ahead)
        requests = [stand.submit("a", drafter), stand.submit("b", drafter, n=2, start=4), stand.submit("c", start=5)]
        events = stand.run()
        assert all(told(events, r.request_id)[:8] == expected(r)[:8] for r in (requests[0], requests[2]))
        found.append({name: sorted(map(repr, filter(lambda e: e.request_id == name, events))) for name in "abc"})
        assert stand.engine.metrics.num_forwards == stand.log.count("forward")
        assert drafter == "off" or stand.engine.metrics.speculation.num_accepted_tokens > 0
    assert found[0] == found[1]


def test_a_request_that_ends_in_flight_is_gone_at_once() -> None:
    stand = Stand(ahead=True)
    stand.submit("a")
    other = stand.submit("b", start=4)
    events = stand.engine.step() + stand.engine.step()
    before = len(told(events, "a"))
    stand.engine.abort("a")
    again = stand.submit("c", start=6)  # takes its pages while its rows are still out
    rest = stand.run()
    failed = [event for event in rest if isinstance(event, Failed)]
    assert before == 1 and len(failed) == 1 and isinstance(failed[0].error, Cancelled)
    assert told(rest, "c") == expected(again) and not told(rest, "a") and told(events + rest, "b") == expected(other)
    assert stand.engine.pool.num_referenced == 0


def test_the_last_request_may_end_in_flight() -> None:
    stand = Stand(ahead=True)
    stand.submit("a")
    stand.engine.step()
    stand.engine.abort("a")
    assert [type(event) for event in stand.run()] == [Failed] and not stand.engine.has_work()
    request = stand.submit("b")
    assert told(stand.run(), "b") == expected(request)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_token_without_a_text_costs_its_request(ahead: bool, place: int) -> None:
    plain = Stand(ahead)
    first, other = plain.submit("a"), plain.submit("b", start=4)
    cursed = expected(first)[place]
    stand = Stand(ahead, cursed)
    first, other = stand.submit("a"), stand.submit("b", start=4)
    events = stand.run()
    for request in (first, other):
        ids, mine = expected(request), [event for event in events if event.request_id == request.request_id]
        if cursed in ids:
            assert told(events, request.request_id) == ids[: ids.index(cursed)]
            assert isinstance(mine[-1], Failed) and isinstance(mine[-1].error, EngineFault)
            assert "no text" in str(mine[-1].error) and sum(isinstance(event, Failed) for event in mine) == 1
        else:
            assert told(events, request.request_id) == ids and isinstance(mine[-1], Finished)
    assert stand.engine.pool.num_referenced == 0
