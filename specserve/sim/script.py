"""What happens in one episode, written down before it starts: a small world, arrivals and faults.

A script is data. It can be printed, read back, and made shorter action by action, and everything that is not in it
(draft trees, answers) is a function of ids and not of what else is going on, so a shorter script still means the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

VOCAB_SIZE = 24
EOS = 0
POISON = 23  # a row of this token is not finite, nor is any that sees it; only prompts and bad guesses have it
SHARP, SOFT = 1.3, 0.7  # temperatures: a hash decides alone, or the coupled noise does

CANCEL_PHASES = ("queued", "prefill", "decoding", "preempted", "ended")
DRAFTER_FAULTS = (
    "start raises",
    "propose raises",
    "observe raises",
    "stop raises",
    "id outside the vocabulary",
    "parent that comes later",
    "twins",
    "a tree too few",
    "more nodes than asked",
)
DRAFTERS = ("ngram", "tree")
SALTS = ("", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The engine of one episode. `truth` is how often the tree drafter knows the next token."""

    name: str
    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    min_chunk: int
    max_num_batched_tokens: int
    max_num_queued_requests: int
    enable_prefix_caching: bool
    truth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Request `number` is submitted before step `at`; it gives up `patience` seconds later."""

    at: int
    number: int
    prompt: tuple[int, ...]
    max_tokens: int | None
    min_tokens: int
    n: int
    temperature: float
    seed: int
    stop_id: int | None
    stop_text: int | None
    priority: int
    drafter: str
    nodes: int
    patience: float | None
    salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong from step `at` on, as soon as it can.

    kind: `cancel` request `number` when it is in `phase`; `not finite`: row `row` of its rows; `forward raises`;
    `duplicate`: its id is submitted again; `slow`: the next forward takes `seconds`; or one of DRAFTER_FAULTS, of
    drafter `drafter`.
    """

    at: int
    kind: str
    number: int = 0
    phase: str = ""
    row: int = 0
    seconds: float = 0.0
    drafter: str = ""


Action = Arrival | Fault


def draw_world(name: str, rng: random.Random) -> World:
    page_size = rng.choice((1, 2, 4, 8, 16))
    pool_tokens = rng.choice((48, 96, 192, 384))
    max_num_seqs = rng.randint(4, 12)
    min_chunk = rng.randint(1, 8)
    return World(
        name=name,
        num_pages=pool_tokens // page_size,
        page_size=page_size,
        max_model_len=rng.choice((24, 48, 80)),
        max_num_seqs=max_num_seqs,
        min_chunk=min_chunk,
        max_num_batched_tokens=max_num_seqs + min_chunk + rng.choice((0, 8, 40)),
        max_num_queued_requests=rng.choice((8, 16, 64)),
        enable_prefix_caching=rng.random() < 0.8,
        truth=rng.choice((0.0, 0.5, 0.9, 1.0)),
    )


def draw_script(world: World, rng: random.Random, num_arrivals: int = 150) -> tuple[Action, ...]:
    """Bursts of arrivals that keep the engine busy, and about one fault per four of them."""
    books = [[rng.randrange(1, POISON) for _ in range(world.max_model_len)] for _ in range(3)]
    actions: list[Action] = []
    at = 0
    for number in range(num_arrivals):
        at += rng.choice((0, 0, 0, 1, 1, 2, 3, 8))
        actions.append(_draw_arrival(at, number, world, books, rng))
        if rng.random() < 0.3:
            actions.append(_draw_fault(at, number, rng))
    return in_order(actions)


def _draw_arrival(at: int, number: int, world: World, books: list[list[int]], rng: random.Random) -> Arrival:
    """Prompts are beginnings of a few books, so that they meet in the prefix index."""
    room = min(world.max_model_len, world.num_pages * world.page_size)
    prompt = rng.choice(books)[: rng.randint(1, room // 2)]
    if rng.random() < 0.5:
        prompt = prompt[: rng.randint(1, len(prompt))] + [rng.randrange(1, POISON) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.03:
        prompt[rng.randrange(len(prompt))] = POISON
    max_tokens = rng.choice((None, None, 1, 2, *(rng.randint(3, room // 2) for _ in range(4)), rng.randint(3, room)))
    return Arrival(
        at=at,
        number=number,
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, 0, min(4, max_tokens or 4))),
        n=rng.choice((1, 1, 1, 1, 1, 2, 3)),
        temperature=rng.choice((0.0, 0.0, 0.0, SHARP, SHARP, SOFT)),
        seed=rng.getrandbits(64),
        stop_id=rng.choice((None, None, None, rng.randrange(1, POISON))),
        stop_text=rng.choice((None, None, None, rng.randrange(1, POISON))),
        priority=rng.choice((0, 0, 0, 1)),
        drafter=rng.choice(("off", "ngram", "tree", "tree")),
        nodes=rng.choice((0, 1, 2, 3, 5, 9)),
        patience=rng.choice((None, None, None, None, None, rng.uniform(0.0, 1.0))),
        salt=rng.choice((SALTS[0], *SALTS)),
    )


def _draw_fault(arrived: int, number: int, rng: random.Random) -> Fault:
    """A fault after an arrival, of it or of one that is probably still in flight."""
    at = arrived + rng.randint(0, 8)
    number = max(0, number - rng.choice((0, 0, 1, 3)))
    match rng.randrange(9):
        case 0 | 1 | 2:
            return Fault(at=arrived, kind="cancel", number=number, phase=rng.choice(CANCEL_PHASES))
        case 3:
            return Fault(at=at, kind="not finite", number=number, row=rng.choice((0, 0, 1, 2, 5)))
        case 4:
            return Fault(at=at, kind="forward raises" if rng.random() < 0.5 else "slow", seconds=rng.uniform(0.1, 1.0))
        case 5:
            return Fault(at=at, kind="duplicate", number=number)
        case _:
            return Fault(at=at, kind=rng.choice(DRAFTER_FAULTS), drafter=rng.choice(DRAFTERS))


def to_json(world: World, actions: Sequence[Action]) -> dict[str, Any]:
    """A script as plain data; `from_json` reads it back."""
    return {
        "world": asdict(world),
        "arrivals": [asdict(action) for action in actions if isinstance(action, Arrival)],
        "faults": [asdict(action) for action in actions if isinstance(action, Fault)],
    }


def from_json(data: dict[str, Any]) -> tuple[World, tuple[Action, ...]]:
    """Raises KeyError or TypeError if `data` was not made by `to_json`.

    Of one step, arrivals come before faults and each in its own order, as the script that was drawn had them.
    """
    arrivals = [Arrival(**{**fields, "prompt": tuple(fields["prompt"])}) for fields in data["arrivals"]]
    actions: list[Action] = [*arrivals, *(Fault(**fields) for fields in data["faults"])]
    return World(**data["world"]), in_order(actions)


def in_order(actions: Sequence[Action]) -> tuple[Action, ...]:
    """By step; of one step arrivals first."""
    return tuple(sorted(actions, key=lambda action: (action.at, isinstance(action, Fault))))
