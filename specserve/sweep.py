"""What steps cost on this machine: a short run of the real engine at start-up, in at most two seconds.

The engine is a throw-away one over the product's runner, so that a step's seconds hold everything from its plan to its
events, the Python of it too. It answers made-up prompts with drafts of a given size, most of them wrong; the pages that
it wrote are free afterwards. Noise only ever adds time, so each figure is the least of a few, taken in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf

from specserve.config import ModelLimits
from specserve.costs import StepCosts, monotone
from specserve.engine import Engine
from specserve.errors import Cancelled
from specserve.events import Delta, Failed
from specserve.proposal import Drafter, DraftRow, DraftTree, StepResult
from specserve.request import Request, SamplingParams, SpeculationParams

DRAFTER = "sweep"
ROWS = (1, 4, 8, 16, 17, 32, 33, 48, 49, 64)  # kernels work in tiles of 16 or 32 rows
SHORT, LONG = 16, 512  # tokens of context
NUM_SEQUENCES = 16
CURVE_SECONDS, ALL_SECONDS = 0.9, 1.8  # after which nothing is repeated any more
MIN_TURNS, MAX_TURNS = 2, 6
MIN_ROOM = 256  # tokens that a context must have room for

MakeEngine = Callable[[Mapping[str, Drafter]], Engine]


class _Chains:
    """Chains of as many nodes as were ordered: `right` tokens, as far as they are known, then wrong ones."""

    name = DRAFTER
    wants_top_ids = False

    def __init__(self) -> None:
        self.num_nodes = 0
        self.right: Sequence[int] = ()

    def start(self, view: DraftRow) -> None: ...

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        return [self._chain(row, min(self.num_nodes, cap)) for row, cap in zip(rows, caps, strict=True)]

    def _chain(self, row: DraftRow, num_nodes: int) -> DraftTree:
        right = self.right[len(row.token_ids) - row.prompt_len :][:num_nodes]
        return DraftTree.chain([*right, *range(1, 1 + num_nodes - len(right))], DRAFTER)

    def observe(self, view: DraftRow, result: StepResult) -> None: ...

    def stop(self, view: DraftRow) -> None: ...


class _Bench:
    """Some sequences at a time on the throw-away engine. RuntimeError: the model's rows fail."""

    def __init__(self, make_engine: MakeEngine, vocab_size: int, clock: Callable[[], float]) -> None:
        self.chains = _Chains()
        self.answer: list[int] = []  # of the first sequence
        self._engine = make_engine({DRAFTER: self.chains})
        self._vocab_size = vocab_size
        self._clock = clock
        self._names: list[str] = []
        self._began = clock()

    def late(self, seconds: float) -> bool:
        return self._clock() - self._began > seconds

    def open(self, num_sequences: int, length: int, temperature: float = 0.0) -> float:
        """Replace what runs; returns the seconds of the first step, which takes the first prompt's rows."""
        for name in self._names:
            self._engine.abort(name)
        self._engine.step()
        self._names = [f"{DRAFTER}-{i}" for i in range(num_sequences)]
        for i, name in enumerate(self._names):
            self._engine.submit(
                Request(
                    request_id=name,
                    prompt_token_ids=tuple((31 * j + 17 * i) % self._vocab_size for j in range(length)),
                    params=SamplingParams(temperature=temperature, seed=i, ignore_eos=True),
                    speculation=SpeculationParams(drafter=DRAFTER, num_draft_tokens=ROWS[-1]),
                )
            )
        self.answer = []
        _, seconds = self.step(0)
        while not all(s.has_token for s in self._engine.scheduler.running) or self._engine.scheduler.waiting:
            self.step(0)
        return seconds

    def step(self, num_nodes: int) -> tuple[int, float]:
        """Rows of a step with so many nodes for each sequence, and its seconds."""
        self.chains.num_nodes = num_nodes
        before, began = self._engine.metrics.num_rows, self._clock()
        events = self._engine.step()
        seconds = self._clock() - began - self._engine.drafting.seconds
        for event in events:
            if isinstance(event, Failed) and not isinstance(event.error, Cancelled):
                raise RuntimeError(str(event.error))
            if isinstance(event, Delta) and event.request_id == self._names[0]:
                self.answer += [token.token_id for token in event.tokens]
        return self._engine.metrics.num_rows - before, seconds

    def least(self, num_nodes: int) -> float:
        """Seconds of such a step at best."""
        least = inf
        for turn in range(MAX_TURNS):
            if turn < MIN_TURNS or not self.late(ALL_SECONDS):
                least = min(least, self.step(num_nodes)[1])
        return least


def measure(
    make_engine: MakeEngine, limits: ModelLimits, clock: Callable[[], float] = time.perf_counter
) -> StepCosts | None:
    """The costs of this machine's steps; None: contexts are too short to try, or the model's rows fail.

    Args:
        make_engine: an engine with these drafters, and no others, over the runner; nobody else steps that meanwhile.
    """
    room = min(limits.max_model_len, limits.pool_tokens)
    if room < MIN_ROOM:
        return None
    try:
        return _measure(_Bench(make_engine, limits.vocab_size, clock), limits)
    except RuntimeError:
        return None


def _measure(bench: _Bench, limits: ModelLimits) -> StepCosts:
    bench.open(1, SHORT)
    for num_nodes in (0, ROWS[-1] - 1):  # whatever is done only once
        bench.step(num_nodes)
    curve = _curve(bench)
    answer = bench.answer
    row = (curve[-1] - curve[len(curve) // 2]) / (len(curve) // 2)

    def above(seconds: float, num_rows: int, count: int) -> float:
        return max(seconds - curve[min(num_rows, len(curve) - 1)], 0.0) / count

    bench.chains.right = answer
    bench.open(1, SHORT)
    num_nodes = min(15, len(curve) - 2)
    accepted = above(bench.least(num_nodes), 1 + num_nodes, num_nodes)
    bench.chains.right = ()
    bench.open(1, SHORT, temperature=0.8)
    sampled = above(bench.least(num_nodes), 1 + num_nodes, 1 + num_nodes)
    sequence = _sequence(bench, limits, curve)
    long = min(LONG, min(limits.max_model_len, limits.pool_tokens) // 2)
    prompt = bench.open(1, long)
    one, many = above(bench.least(0), 1, long), above(bench.least(len(curve) - 2), len(curve) - 1, long)
    node_context = max(many - one, 0.0) / (len(curve) - 2)
    return StepCosts(
        curve=curve,
        row=max(row, 0.0) if long < len(curve) else above(prompt, len(curve) - 1, long - len(curve) + 1),
        sequence=sequence,
        accepted=accepted,
        context=one,
        node_context=node_context,
        sampled=sampled,
    )


def _curve(bench: _Bench) -> tuple[float, ...]:
    least: dict[int, float] = {}
    for turn in range(MAX_TURNS):
        if turn < MIN_TURNS or not bench.late(CURVE_SECONDS):
            for num_rows in ROWS:
                rows, seconds = bench.step(num_rows - 1)
                least[rows] = min(seconds, least.get(rows, inf))
    return monotone(sorted(least.items()))


def _sequence(bench: _Bench, limits: ModelLimits, curve: Sequence[float]) -> float:
    """Seconds of each further sequence: so many sequences of one row against one of so many rows."""
    count = min(NUM_SEQUENCES, limits.max_num_seqs, limits.pool_tokens // (4 * SHORT), len(curve) - 1)
    if count < 2:
        return 0.0
    bench.open(count, SHORT)
    return max(bench.least(0) - curve[count], 0.0) / (count - 1)
