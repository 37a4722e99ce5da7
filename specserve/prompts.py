"""Prompts from a file, for everything that runs many of them: proofs, load, benches."""

from __future__ import annotations

import json
from pathlib import Path

from specserve.errors import ConfigError

# ours: eight prompts of each of six categories
OWN_PROMPTS = Path(__file__).with_suffix(".jsonl")


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(category, prompt) of every line of a JSONL file: `prompt`, or the first of `turns` as in Spec-Bench.

    Raises:
        ConfigError: the file cannot be read, or a line holds neither; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset {path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry["turns"][0] if "turns" in entry else entry["prompt"]
            category = str(entry.get("category", "all"))
        except (ValueError, LookupError, TypeError, AttributeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"dataset {path}, line {number}: no JSON object with a `prompt` or with `turns`")
        found.append((category, prompt))
    if not found:
        raise ConfigError(f"dataset {path} holds no prompts")
    return found
