"""Asks every prompt plainly and with each drafter, alone and in turns, on one engine in this process.

Turns, so that a slow moment of the machine hits all alike; one engine, so that all share weights and kernels. Each side
has a salt of its own: what a drafter keeps of earlier requests grows with its own answers and holds none that another
side gave to the same prompt. Recorders stand before the engine's drafters, pass everything on, and keep the trees.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

from specserve.acceptance.questions import Settings, cut
from specserve.acceptance.records import PLAIN, Answer, Draft, Side, Step, prompt_name
from specserve.build import Built
from specserve.engine import Engine
from specserve.events import Delta, Event, Failed, Finished
from specserve.llm import LOCAL_SALT
from specserve.metrics import EngineMetrics
from specserve.proposal import Drafter, DraftRow, DraftTree, StepResult
from specserve.request import Request, SamplingParams, SpeculationParams

WARM_UP_TOKENS = 8


def measure(
    built: Built,
    prompts: Sequence[tuple[str, str]],
    sides: Sequence[Side],
    settings: Settings,
    progress: Callable[[int], None] = lambda done: None,
    plainly: bool = True,
    salt: str = LOCAL_SALT,
) -> list[Answer]:
    """Answers of every (category, text), plainly and by each side, one request at a time.

    Args:
        progress: told how many of len(prompts) * (1 + len(sides)) answers there are.
        plainly: without it nothing is answered plainly, and nobody can say how much faster a side is.
        salt: what the salts of the sides begin with.

    Raises:
        InvalidRequest: a prompt, a drafter or a number is refused.
    """
    everyone = (PLAIN, *sides) if plainly else tuple(sides)
    with _recorded(built.engine) as recorders:
        for side in everyone:  # what is done once is paid here
            warm_up = replace(settings, max_tokens=WARM_UP_TOKENS)
            _answer(built, recorders, prompts[0], side, warm_up, f"{salt}: warm-up")
        answers: list[Answer] = []
        for number, prompt in enumerate(prompts):
            own_seed = replace(settings, seed=settings.seed + number)  # answers of one seed are correlated
            for turn in range(len(everyone)):
                side = everyone[(number + turn) % len(everyone)]
                own_salt = f"{salt}: {side.label}" + (f" {number}" if side.cold else "")
                answers.append(_answer(built, recorders, prompt, side, own_seed, own_salt))
                progress(len(answers))
    return answers


class _Recorder:
    """A drafter that passes everything on to another one, and keeps what it said and what became of it."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._caps: dict[str, int] = {}
        self.clear()

    def clear(self) -> None:
        self.drafts: list[Draft] = []
        self.num_asked = self.num_unmatched = 0
        self._caps.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> Sequence[DraftTree]:
        self.num_asked += len(rows)
        self._caps |= {row.sequence_id: cap for row, cap in zip(rows, caps, strict=True)}
        trees = self._drafter.propose(rows, caps)
        self.num_unmatched += sum(not len(tree) for tree in trees)
        return trees

    def observe(self, view: DraftRow, result: StepResult) -> None:
        cap = self._caps.pop(view.sequence_id, None)
        if cap is not None:
            self.drafts.append(Draft(cap, result.tree, result.path))
        self._drafter.observe(view, result)


@contextmanager
def _recorded(engine: Engine) -> Iterator[dict[str, _Recorder]]:
    """The engine's drafters behind recorders, by name, for a while."""
    drafters = engine.drafting.drafters
    before = dict(drafters)
    recorders = {name: _Recorder(drafter) for name, drafter in before.items()}
    drafters.update({name: cast(Drafter, recorder) for name, recorder in recorders.items()})
    try:
        yield recorders
    finally:
        drafters.update(before)


def _answer(
    built: Built,
    recorders: dict[str, _Recorder],
    prompt: tuple[str, str],
    side: Side,
    settings: Settings,
    salt: str,
) -> Answer:
    category, text = prompt
    ids = built.tokenizer.encode_chat([{"role": "user", "content": text}])
    request = Request(
        request_id="acceptance",
        prompt_token_ids=cut(ids, settings.max_prompt_tokens),
        params=SamplingParams(
            temperature=settings.temperature, seed=settings.seed, max_tokens=settings.max_tokens
        ),
        speculation=SpeculationParams(drafter=side.drafter, num_draft_tokens=settings.num_draft_tokens),
        cache_salt=salt,
    )  # fmt: skip
    recorder = recorders.get(side.drafter)
    if recorder is not None:
        recorder.clear()
    events, steps = _run(built.engine, request)
    (end,) = (event for event in events if isinstance(event, Finished))
    return Answer(
        prompt=prompt_name(text),
        category=category,
        side=side,
        token_ids=tuple(token.token_id for event in events if isinstance(event, Delta) for token in event.tokens),
        reason=end.reason,
        stats=end.speculation,
        decode_seconds=sum(step.seconds for step in steps),
        num_decoded=sum(step.num_committed for step in steps),
        steps=steps,
        drafts=() if recorder is None else tuple(recorder.drafts),
        num_asked=0 if recorder is None else recorder.num_asked,
        num_unmatched=0 if recorder is None else recorder.num_unmatched,
    )


def _run(engine: Engine, request: Request) -> tuple[list[Event], tuple[Step, ...]]:
    """All events of one request, alone in the engine, and its steps with a root row."""
    events: list[Event] = []
    totals = [_Totals.of(engine.metrics)]
    try:
        engine.submit(request)
        while engine.has_work():
            events += engine.step()
            totals.append(_Totals.of(engine.metrics))
    except BaseException:
        engine.abort(request.request_id)
        engine.step()
        raise
    for event in events:
        if isinstance(event, Failed):
            raise event.error
    grown = (after.since(before) for before, after in itertools.pairwise(totals))
    return events, tuple(step for num_steps, step in grown if num_steps)


class _Totals(NamedTuple):
    """What the engine has counted so far, of which a step is the difference."""

    num_steps: int
    step: Step

    @classmethod
    def of(cls, metrics: EngineMetrics) -> _Totals:
        counts = metrics.speculation
        return cls(
            counts.num_steps,
            Step(
                metrics.num_rows,
                counts.num_draft_tokens,
                counts.num_accepted_tokens,
                counts.num_committed_tokens,
                metrics.step_seconds,
                metrics.draft_seconds,
                metrics.verify_seconds,
            ),
        )

    def since(self, before: _Totals) -> _Totals:
        grown = (after - earlier for after, earlier in zip(self.step, before.step, strict=True))
        return _Totals(self.num_steps - before.num_steps, Step._make(grown))
