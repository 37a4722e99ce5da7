"""What is asked: which prompts of a dataset, in which order, cut to which length, and how answers are drawn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Spec-Bench counts the eight categories of MT-bench as one
MT_BENCH = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How answers are drawn; prompts longer than `max_prompt_tokens` are cut. `num_draft_tokens` None = the
    controller decides."""

    max_tokens: int = 128
    max_prompt_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0
    num_draft_tokens: int | None = None


def chosen(prompts: Sequence[tuple[str, str]], limit: int | None, seed: int) -> list[tuple[str, str]]:
    """(category, text) of the prompts to ask, each once, in a seeded order that takes the categories in turns."""
    merged = MT_BENCH if {category for category, _ in prompts} >= MT_BENCH else frozenset()
    by_text = {text: "mt_bench" if category in merged else category for category, text in prompts}
    distinct = [(category, text) for text, category in by_text.items()]
    shuffled = random.Random(seed).sample(distinct, len(distinct))
    seen: Counter[str] = Counter()
    turns = []
    for category, _ in shuffled:
        turns.append(seen[category])
        seen[category] += 1
    order = sorted(range(len(shuffled)), key=turns.__getitem__)
    return [shuffled[i] for i in order][:limit]


def cut(token_ids: Sequence[int], length: int) -> tuple[int, ...]:
    """At most `length` ids: the first three quarters, and the rest from the end."""
    if len(token_ids) <= length:
        return tuple(token_ids)
    head = 3 * length // 4
    return (*token_ids[:head], *token_ids[len(token_ids) - (length - head) :])
