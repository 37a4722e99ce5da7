"""What is asked, and when: random prompts, prompts of a file, or the lengths and arrivals of a recorded trace.

Everything follows from a seed. A random prompt is a tuple of ids; for endpoints that take text, each id stands for
one common word, which is about a token.
"""

from __future__ import annotations

import csv
import datetime
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specserve.errors import ConfigError

# Prompt tokens that share one id in `hash_ids` of a Mooncake trace.
HASH_BLOCK = 512
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother", "area",
    "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue",
    "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: its prompt, the length of its answer, and when it is sent, in seconds after the start."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One recorded request. Equal `hash_ids` at the front mean equal tokens, in blocks of 512."""

    arrival: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


def random_jobs(count: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[Job]:
    """Prompts of random ids, no two alike."""
    source = random.Random(seed)
    return [Job(prompt=_ids(source, input_len, vocab_size), max_tokens=output_len) for _ in range(count)]


def dataset_jobs(prompts: Sequence[str], count: int, output_len: int) -> list[Job]:
    """The first `count` prompts; from the start again where there are fewer."""
    return [Job(prompt=prompts[i % len(prompts)], max_tokens=output_len) for i in range(count)]


def poisson(jobs: Sequence[Job], rate: float, seed: int) -> list[Job]:
    """The same jobs as a Poisson process of `rate` requests a second."""
    source = random.Random(seed)
    now, found = 0.0, []
    for job in jobs:
        now += source.expovariate(rate)
        found.append(replace(job, arrival=now))
    return found


def trace_jobs(rows: Sequence[TraceRow], vocab_size: int, seed: int, speed: float = 1.0) -> list[Job]:
    """Jobs with a trace's lengths and arrivals, `speed` times as fast; equal hash ids give equal tokens."""
    found = []
    for number, row in enumerate(rows):
        if row.hash_ids:
            blocks = [_ids(random.Random(f"{seed}/{block}"), HASH_BLOCK, vocab_size) for block in row.hash_ids]
            prompt = tuple(token for block in blocks for token in block)[: row.input_len]
        else:
            prompt = _ids(random.Random(f"{seed}/row {number}"), row.input_len, vocab_size)
        found.append(Job(prompt=prompt, max_tokens=row.output_len, arrival=row.arrival / speed))
    return found


def fit(jobs: Sequence[Job], max_len: int) -> tuple[list[Job], int]:
    """Jobs cut to a context of `max_len` tokens, answers to at most half of it; and how many had to be cut."""
    found, num_cut = [], 0
    for job in jobs:
        answer = min(job.max_tokens, max(max_len // 2, 1))
        prompt = job.prompt if isinstance(job.prompt, str) else job.prompt[: max_len - answer]
        num_cut += answer < job.max_tokens or len(prompt) < len(job.prompt)
        found.append(replace(job, prompt=prompt, max_tokens=answer))
    return found, num_cut


def as_text(prompt: str | tuple[int, ...]) -> str:
    """A prompt for an endpoint that takes text."""
    return prompt if isinstance(prompt, str) else " ".join(WORDS[token % len(WORDS)] for token in prompt)


def _ids(source: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(source.randrange(vocab_size) for _ in range(count))


def read_trace(path: Path, limit: int) -> list[TraceRow]:
    """The first `limit` requests of an Azure CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or a Mooncake JSONL
    (timestamp in ms, input_length, output_length, hash_ids); arrivals count from the first.

    Raises:
        ConfigError: the file cannot be read, or a row is not of either form; names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[: limit + 1]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from error
    rows = []
    is_csv = bool(lines) and lines[0].startswith("TIMESTAMP,")
    entries = enumerate(csv.DictReader(lines), 2) if is_csv else enumerate(lines[:limit], 1)
    for number, entry in entries:
        try:
            row = _azure_row(entry) if isinstance(entry, dict) else _mooncake_row(entry)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            form = "Azure CSV" if is_csv else "Mooncake JSONL"
            raise ConfigError(f"trace {path}, line {number}: no row of {form}: {error}") from None
        if row.input_len < 1 or row.output_len < 1:
            continue  # the Azure traces hold a few requests without an answer
        rows.append(row)
    if not rows:
        raise ConfigError(f"trace {path} holds no requests")
    first = min(row.arrival for row in rows)
    return sorted((replace(row, arrival=row.arrival - first) for row in rows), key=lambda row: row.arrival)


def _azure_row(entry: dict[str, str]) -> TraceRow:
    moment = datetime.datetime.fromisoformat(entry["TIMESTAMP"]).replace(tzinfo=datetime.UTC)
    return TraceRow(
        arrival=moment.timestamp(),
        input_len=int(entry["ContextTokens"]),
        output_len=int(entry["GeneratedTokens"]),
    )


def _mooncake_row(line: str) -> TraceRow:
    entry = json.loads(line)
    return TraceRow(
        arrival=entry["timestamp"] / 1e3,
        input_len=int(entry["input_length"]),
        output_len=int(entry["output_length"]),
        hash_ids=tuple(entry.get("hash_ids", ())),
    )
