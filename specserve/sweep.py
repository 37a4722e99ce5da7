"""What steps cost on this machine: a short run of the real engine at start-up, in about two seconds.

Throw-away engines over the product's runner answer made-up prompts with drafts of a given size, so that a step's
seconds hold everything from its plan to its events. What they wrote into the pool is nobody's afterwards, and they do
not mind that they overwrite each other. The kinds of steps take turns, so that what slows the machine for a while slows
all of them; and the forward is timed apart from the Python around it, whose small slopes its noise would drown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from specserve.batch import StepBatch
from specserve.config import ModelLimits
from specserve.costs import StepCosts, monotone
from specserve.engine import Engine
from specserve.events import Failed
from specserve.pages import Move
from specserve.proposal import Drafter, DraftRow, DraftTree, StepResult
from specserve.request import Request, SamplingParams, SpeculationParams
from specserve.runner import ForwardResult, Runner

DRAFTER = "sweep"
ROWS = (1, 8, 16, 17, 32, 33, 48, 64)  # kernels work in tiles of 16 or 32 rows
SHORT, LONG = 16, 512  # tokens of context
NUM_SEQUENCES = 16
SECONDS, MIN_TURNS, MAX_TURNS = 1.7, 3, 9  # no turn begins later than that, if the fewest were taken
MIN_ROOM = 256  # tokens that a context must have room for
RIGHT, WRONG = 2, 1  # tokens

MakeEngine = Callable[[Runner, Mapping[str, Drafter]], Engine]
Clock = Callable[[], float]


class Taken(NamedTuple):
    """Rows of a step, the seconds of its forward, and of all else but drafting."""

    num_rows: int
    forward: float
    host: float


class _Trees:
    """Trees of as many nodes as were ordered, two below each, as their rows cost more than a chain's; or chains."""

    name = DRAFTER
    wants_top_ids = False

    def __init__(self) -> None:
        self.num_nodes = 0
        self.chain_of: int | None = None  # token

    def start(self, view: DraftRow) -> None: ...

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        return [self._tree(min(self.num_nodes, cap)) for cap in caps]

    def _tree(self, count: int) -> DraftTree:
        if self.chain_of is not None:
            return DraftTree.chain((self.chain_of,) * count, DRAFTER)
        ids, parents = tuple(WRONG + i % 2 for i in range(count)), tuple(i // 2 - 1 for i in range(count))
        return DraftTree(ids, parents, (DRAFTER,) * count)

    def observe(self, view: DraftRow, result: StepResult) -> None: ...

    def stop(self, view: DraftRow) -> None: ...


class _Timed:
    """A runner, and the seconds of its last forward."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self.seconds = 0.0
        self._runner = runner
        self._clock = clock

    def forward(self, batch: StepBatch) -> ForwardResult:
        began = self._clock()
        result = self._runner.forward(batch)
        self.seconds = self._clock() - began
        return result

    def apply(self, moves: Sequence[Move], *, copies: bool = False) -> None:
        self._runner.apply(moves, copies=copies)

    def zero(self, pages: Iterable[int]) -> None:
        self._runner.zero(pages)


class _Stand:
    """An engine with some equal sequences that have their first token. RuntimeError: they end."""

    def __init__(
        self, make_engine: MakeEngine, runner: _Timed, clock: Clock, count: int, length: int, params: SamplingParams
    ) -> None:
        self._trees, self._runner, self._clock = _Trees(), runner, clock
        self._engine = make_engine(runner, {DRAFTER: self._trees})
        for i in range(count):
            prompt = tuple((31 * j + 17 * i) % self._engine.limits.vocab_size for j in range(length))
            speculation = SpeculationParams(drafter=DRAFTER, num_draft_tokens=ROWS[-1])
            request = Request(request_id=str(i), prompt_token_ids=prompt, params=params, speculation=speculation)
            self._engine.submit(request)
        self.prompt = self.step(0)  # takes the first prompt's rows
        while self._engine.metrics.num_output_tokens < count:
            self.step(0)

    def step(self, num_nodes: int, chain_of: int | None = None) -> Taken:
        """A step with so many nodes for each sequence; `chain_of`: a chain of this token."""
        self._trees.num_nodes, self._trees.chain_of = num_nodes, chain_of
        before, began = self._engine.metrics.num_rows, self._clock()
        events = self._engine.step()
        seconds = self._clock() - began - self._engine.drafting.seconds
        failed = [event for event in events if isinstance(event, Failed)]
        if failed or not self._engine.has_work():
            raise RuntimeError(f"the sweep's sequences ended: {failed}")
        forward = self._runner.seconds
        return Taken(self._engine.metrics.num_rows - before, forward, seconds - forward)


def measure(
    runner: Runner, make_engine: MakeEngine, limits: ModelLimits, clock: Clock = time.perf_counter
) -> StepCosts | None:
    """The costs of this machine's steps; None: contexts are too short to try, or the model's rows fail.

    Args:
        make_engine: an engine with these drafters and no others over a runner, this one or one around it.
    """
    room = min(limits.max_model_len, limits.pool_tokens)
    if room < MIN_ROOM:
        return None
    began, timed = clock(), _Timed(runner, clock)
    count = min(NUM_SEQUENCES, limits.max_num_seqs, limits.pool_tokens // (8 * SHORT))

    def stand(count: int, length: int, temperature: float = 0.0, allowed: tuple[int, ...] | None = None) -> _Stand:
        params = SamplingParams(temperature=temperature, seed=1, ignore_eos=True, allowed_token_ids=allowed)
        return _Stand(make_engine, timed, clock, count, length, params)

    try:
        short, sampled, forced = stand(1, SHORT), stand(1, SHORT, temperature=0.8), stand(1, SHORT, allowed=(RIGHT,))
        many, deep = stand(count, SHORT), stand(1, min(LONG, room // 2))
        turns: list[dict[str, Taken]] = []
        while len(turns) < MIN_TURNS or (len(turns) < MAX_TURNS and clock() - began < SECONDS):
            turn = {f"short {rows}": short.step(rows - 1) for rows in ROWS}
            turn |= {"greedy": short.step(15), "sampled": sampled.step(15), "many": many.step(0)}
            turn |= {"wrong": forced.step(15, WRONG), "right": forced.step(15, RIGHT)}
            turn |= {"deep": deep.step(0), "lone": short.step(0), "deep again": deep.step(0), "deep 32": deep.step(31)}
            turns.append(turn)
    except RuntimeError:
        return None
    return _costs(turns[1:], deep.prompt)  # the first turn warmed up


def _costs(turns: Sequence[Mapping[str, Taken]], prompt: Taken) -> StepCosts:
    """The curve from forwards and host seconds; slopes from differences, where what noise made negative is 0."""
    forward = settled([{kind: taken.forward for kind, taken in turn.items()} for turn in turns])
    host = {kind: min(turn[kind].host for turn in turns) for kind in turns[0]}
    num_rows = {kind: taken.num_rows for kind, taken in turns[0].items()}

    def slope(seconds: Mapping[str, float], more: str, less: str, count: int) -> float:
        return max(seconds[more] - seconds[less], 0.0) / max(count, 1)

    kinds = [f"short {rows}" for rows in ROWS]
    forwards = monotone(sorted({num_rows[kind]: forward[kind] for kind in kinds}.items()))
    last, long = len(forwards) - 1, prompt.num_rows
    per_row = slope(host, kinds[-1], kinds[0], last - 1)
    curve = tuple(seconds + host[kinds[0]] + per_row * max(n - 1, 0) for n, seconds in enumerate(forwards))
    forward["deep"] = min(forward["deep"], forward["deep again"])
    context = slope(forward, "deep", "lone", long)
    return StepCosts(
        curve=curve,
        row=max(prompt.forward + prompt.host - curve[last], 0.0) / max(long - last, 1),
        sequence=slope(host, "many", "greedy", num_rows["many"] - 1),
        accepted=slope(host, "right", "wrong", num_rows["right"] - 1),
        context=context,
        node_context=max(slope(forward, "deep 32", "short 32", long) - context, 0.0) / (num_rows["deep 32"] - 1),
        sampled=slope(host, "sampled", "greedy", num_rows["sampled"]),
    )


def settled(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of each kind of step when the machine is at its fastest.

    A machine may slow down for a while, which all steps of that turn share, or stall during one step. So each turn is
    brought to the speed of the fastest one by what most of its steps say, and of each kind the median counts.
    """
    least = {kind: min(turn[kind] for turn in turns) for kind in turns[0]}
    slowness = [median(turn[kind] / least[kind] for kind in least) for turn in turns]
    return {kind: median(turn[kind] / slow for turn, slow in zip(turns, slowness, strict=True)) for kind in least}
