"""What steps cost on this machine: a short run of the real engine at start-up, in about two seconds.

Throw-away engines over the product's runner answer made-up prompts with drafts of a given size, so that a step's
seconds hold everything from its plan to its events, the Python of it too. What they wrote into the pool is nobody's
afterwards, and they do not mind that they overwrite each other. The kinds of steps
take turns, so that what slows the machine for a while slows all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from specserve.config import ModelLimits
from specserve.costs import StepCosts, monotone
from specserve.engine import Engine
from specserve.events import Failed
from specserve.proposal import Drafter, DraftRow, DraftTree, StepResult
from specserve.request import Request, SamplingParams, SpeculationParams

DRAFTER = "sweep"
ROWS = (1, 8, 16, 17, 32, 33, 48, 64)  # kernels work in tiles of 16 or 32 rows
SHORT, LONG = 16, 512  # tokens of context
NUM_SEQUENCES = 16
SECONDS, MIN_TURNS, MAX_TURNS = 1.7, 3, 8  # no turn begins later than that, if the fewest were taken
MIN_ROOM = 256  # tokens that a context must have room for
RIGHT, WRONG = 2, 1  # tokens

MakeEngine = Callable[[Mapping[str, Drafter]], Engine]


class _Chains:
    """Chains of as many nodes as were ordered, all of one token."""

    name = DRAFTER
    wants_top_ids = False

    def __init__(self) -> None:
        self.num_nodes = 0
        self.token_id = WRONG

    def start(self, view: DraftRow) -> None: ...

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.chain((self.token_id,) * min(self.num_nodes, cap), DRAFTER) for cap in caps]

    def observe(self, view: DraftRow, result: StepResult) -> None: ...

    def stop(self, view: DraftRow) -> None: ...


class _Stand:
    """An engine with some equal sequences that have their first token."""

    def __init__(
        self,
        make_engine: MakeEngine,
        clock: Callable[[], float],
        num_sequences: int,
        length: int,
        params: SamplingParams,
    ) -> None:
        self.prompt_seconds = 0.0  # of the first step, which takes the first prompt's rows
        self._chains = _Chains()
        self._engine = make_engine({DRAFTER: self._chains})
        self._clock = clock
        for i in range(num_sequences):
            prompt = tuple((31 * j + 17 * i) % self._engine.limits.vocab_size for j in range(length))
            speculation = SpeculationParams(drafter=DRAFTER, num_draft_tokens=ROWS[-1])
            request = Request(request_id=str(i), prompt_token_ids=prompt, params=params, speculation=speculation)
            self._engine.submit(request)
        _, self.prompt_seconds = self.step(0)
        while self._engine.metrics.num_output_tokens < num_sequences:
            self.step(0)

    def step(self, num_nodes: int, token_id: int = WRONG) -> tuple[int, float]:
        """Rows of a step with so many nodes for each sequence, and its seconds without the drafter's."""
        self._chains.num_nodes, self._chains.token_id = num_nodes, token_id
        before, began = self._engine.metrics.num_rows, self._clock()
        events = self._engine.step()
        seconds = self._clock() - began - self._engine.drafting.seconds
        failed = [event for event in events if isinstance(event, Failed)]
        if failed or not self._engine.has_work():
            raise RuntimeError(f"the sweep's sequences ended: {failed}")
        return self._engine.metrics.num_rows - before, seconds


Kind = tuple[str, int]  # its name and its rows
Turn = dict[Kind, float]  # seconds


def settled(turns: Sequence[Turn]) -> Turn:
    """Seconds of each kind of step when the machine is at its fastest.

    A machine may slow down for a while, which all kinds of steps of that turn share, or stall during one step. So each
    turn is brought to the speed of the fastest one by what most of its steps say, and of each kind the median counts.
    """
    least = {kind: min(turn[kind] for turn in turns) for kind in turns[0]}
    slowness = [median(turn[kind] / least[kind] for kind in least) for turn in turns]
    return {kind: median(turn[kind] / slow for turn, slow in zip(turns, slowness, strict=True)) for kind in least}


def measure(
    make_engine: MakeEngine, limits: ModelLimits, clock: Callable[[], float] = time.perf_counter
) -> StepCosts | None:
    """The costs of this machine's steps; None: contexts are too short to try, or the model's rows fail.

    Args:
        make_engine: an engine with these drafters and no others over the runner, which nobody else uses meanwhile.
    """
    room = min(limits.max_model_len, limits.pool_tokens)
    if room < MIN_ROOM:
        return None
    try:
        return _measure(make_engine, limits, min(LONG, room // 2), clock)
    except RuntimeError:
        return None


def _measure(make_engine: MakeEngine, limits: ModelLimits, long: int, clock: Callable[[], float]) -> StepCosts:
    began = clock()
    count = min(NUM_SEQUENCES, limits.max_num_seqs, limits.pool_tokens // (8 * SHORT))

    def stand(
        num_sequences: int, length: int, temperature: float = 0.0, allowed: tuple[int, ...] | None = None
    ) -> _Stand:
        params = SamplingParams(temperature=temperature, seed=1, ignore_eos=True, allowed_token_ids=allowed)
        return _Stand(make_engine, clock, num_sequences, length, params)

    short, sampled, forced = stand(1, SHORT), stand(1, SHORT, temperature=0.8), stand(1, SHORT, allowed=(RIGHT,))
    many, deep = stand(count, SHORT), stand(1, long)
    turns: list[Turn] = []
    while len(turns) < MIN_TURNS or (len(turns) < MAX_TURNS and clock() - began < SECONDS):
        turn: Turn = {}
        for kind, stood, num_nodes, token_id in (
            *(("short", short, num_rows - 1, WRONG) for num_rows in ROWS),
            ("sampled", sampled, 15, WRONG),
            ("wrong", forced, 15, WRONG),
            ("right", forced, 15, RIGHT),
            ("many", many, 0, WRONG),
            ("deep", deep, 0, WRONG),
            ("deep", deep, ROWS[-1] - 1, WRONG),
        ):
            num_rows, seconds = stood.step(num_nodes, token_id)
            turn[kind, num_rows] = seconds
        turns.append(turn)
    return _costs(settled(turns[1:]), count, long, deep.prompt_seconds)  # the first turn warmed up


def _costs(seconds: Turn, count: int, long: int, prompt_seconds: float) -> StepCosts:
    """Slopes from differences between kinds; what noise made negative is 0."""

    def of(name: str) -> list[tuple[int, float]]:
        return sorted((rows, value) for (kind, rows), value in seconds.items() if kind == name)

    curve = monotone(of("short"))
    last = len(curve) - 1

    def above(name: str, at: int = 0) -> tuple[int, float]:
        """Rows, and seconds beyond those of as many rows of the short sequence."""
        rows, value = of(name)[at]
        return rows, max(value - curve[min(rows, last)], 0.0)

    sampled_rows, sampled = above("sampled")
    (rows, wrong), (_, right) = of("wrong")[0], of("right")[0]
    (_, context), (deep_rows, contexts) = above("deep"), above("deep", -1)
    return StepCosts(
        curve=curve,
        row=max(prompt_seconds - curve[last], 0.0) / (long - last),
        sequence=above("many")[1] / max(count - 1, 1),
        accepted=max(right - wrong, 0.0) / (rows - 1),
        context=context / long,
        node_context=max(contexts - context, 0.0) / long / (deep_rows - 1),
        sampled=sampled / sampled_rows,
    )
