"""What every bench shares: prompts, interleaved timing, tables, and a JSON file with its provenance."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specserve.config import EngineConfig
from specserve.prompts import OWN_PROMPTS as PROMPTS
from specserve.provenance import provenance
from specserve.tables import table

__all__ = ["FORMATS", "PROMPTS", "interleaved", "known_formats", "medians", "table", "write"]

# Engine options of each weight format; one that this build lacks is left out of every table.
FORMATS = {"bf16": {"dtype": "bfloat16"}, "fp32": {"dtype": "float32"}, "int8": {"quantization": "int8"}}
FOLDER = Path(__file__).resolve().parent / "results"


def known_formats() -> list[str]:
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    return [name for name, options in FORMATS.items() if options.keys() <= fields]


def interleaved(work: Mapping[str, Callable[[], object]], seconds: float, least: int = 5) -> dict[str, list[float]]:
    """Milliseconds of every piece of work, taken in turns so that a slow moment of the machine hits all alike.

    Each piece runs once unmeasured, then at least `least` times, until all together took `seconds`.
    """
    times: dict[str, list[float]] = {name: [] for name in work}
    for piece in work.values():
        piece()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()), ())) < least:
        for name, piece in work.items():
            start = time.perf_counter()
            piece()
            times[name].append(1e3 * (time.perf_counter() - start))
        if not work:
            break
    return times


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def write(name: str, record: Mapping[str, Any], tables: Mapping[str, str], environment: str, seed: int) -> Path:
    """Print the tables, and write record, tables and provenance to results/NAME.json."""
    for title, text in tables.items():
        print(f"\n{title}\n\n{text}")
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    found = {"bench": name, **record, "tables": dict(tables), "provenance": provenance(environment, seed)}
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}")
    return path
