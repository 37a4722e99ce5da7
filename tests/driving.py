"""A drafter driven by hand over a known answer: no model, no engine, one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specserve.proposal import Drafter, DraftRow, DraftTree, StepResult
from specserve.verify import walk

VOCAB = 1000


class Step(NamedTuple):
    """What was drafted, which nodes of it came true, and where in the answer that was (tokens known before)."""

    tree: DraftTree
    path: tuple[int, ...]
    at: int


def row(tokens: Sequence[int], prompt_len: int, name: str = "s/0", salt: str = "", **fields: object) -> DraftRow:
    """A sequence that ends with its root."""
    made = DraftRow(
        sequence_id=name,
        token_ids=list(tokens),
        prompt_len=prompt_len,
        cached_len=len(tokens) - 1,
        seed=1,
        choice=0,
        temperature=0.0,
        salt=salt,
    )
    return made._replace(**fields)


def drive(
    drafter: Drafter,
    prompt: Sequence[int],
    answer: Sequence[int],
    cap: int = 8,
    name: str = "s/0",
    salt: str = "",
    **fields: object,
) -> list[Step]:
    """Serve one request whose answer is known, from its first token to its end; every tree must be verifiable."""
    tokens, known, steps = [*prompt, answer[0]], 1, []
    drafter.start(row(tokens, len(prompt), name, salt, **fields))
    while known < len(answer):
        (tree,) = drafter.propose([row(tokens, len(prompt), name, salt, **fields)], [cap])
        assert tree.fault(VOCAB) is None and len(tree) <= cap
        rest = answer[known:]
        # the true token at the root and at each node on the true path; what follows other paths is nobody's business
        drawn = [rest[0]]
        for path in tree.paths():
            follows = list(rest[: len(path)]) == list(path) and len(path) < len(rest)
            drawn.append(rest[len(path)] if follows else -1)
        path, _ = walk(tree, drawn)
        kept = tuple(rest[: len(path) + 1])
        steps.append(Step(tree, path, known))
        tokens += kept
        known += len(kept)
        drafter.observe(row(tokens, len(prompt), name, salt, **fields), StepResult(tree, path, kept, drawn))
    drafter.stop(row(tokens, len(prompt), name, salt, **fields))
    return steps
