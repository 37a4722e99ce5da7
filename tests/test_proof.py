"""`specserve verify`: it says identical where speculation is lossless, and where and by how much when it is not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import TinyLlama
from typer.testing import CliRunner, Result

from specserve import engine
from specserve.cli import app
from specserve.errors import ConfigError
from specserve.events import SpeculationStats
from specserve.prompts import read_prompts
from specserve.proof import PROMPTS, TIE_MARGIN, Comparison, Divergence, Proof
from specserve.proposal import DraftTree
from specserve.verify import walk


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> str:
    return str(tiny_llama(layers=1, seed=3))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Prompts that repeat themselves, so that prompt lookup has something to say."""
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [{"prompt": "the world the world the world"}, {"turns": ["Hello " * 5, "Bye"]}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def verify(model: str, *arguments: str) -> Result:
    return CliRunner().invoke(
        app,
        [
            "verify",
            "--model",
            model,
            "--drafter",
            "ngram",
            "--num-draft-tokens",
            "5",
            "--max-tokens",
            "24",
            "--kv-cache-gib",
            "0.01",
            *arguments,
        ],
    )


def accept_a_wrong_child(tree: DraftTree, drawn: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Not lossless: the first child is taken although the target drew something else."""
    path, bonus = walk(tree, drawn)
    return (path, bonus) if path or not len(tree) else ((0,), drawn[1])


def test_identical_answers_exit_with_zero(model: str, dataset: Path) -> None:
    result = verify(model, "--dataset", str(dataset))
    assert result.exit_code == 0, result.output
    assert "8 of 8 answers are identical" in result.stdout
    assert "DIFFERENT" not in result.stdout


def test_json_is_one_object_with_every_comparison(model: str) -> None:
    result = verify(model, "--limit", "2", "--json", "--num-draft-tokens", "3")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["identical"], told["divergent"], told["holds"]) == (8, 0, True)
    assert told["num_draft_tokens"] > 0
    ways = {(c["prompt"], c["temperature"] > 0, c["batched"]) for c in told["comparisons"]}
    assert len(ways) == 8


def test_a_lossy_engine_is_caught(model: str, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong token is only kept in the KV cache and in the path's length, as a wrong verification would."""

    def commit_the_draft(self: Any, span: Any, result: Any, drawn: Any) -> tuple[int, ...]:
        path, _ = accept_a_wrong_child(span.tree, drawn.ids)
        drawn.ids[0] = span.tree.token_ids[path[0]] if path else drawn.ids[0]
        return path

    monkeypatch.setattr(engine.Engine, "_accepted", commit_the_draft)
    result = verify(model, "--dataset", str(dataset), "--json")
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)
    assert not told["holds"]
    found = next(c["divergence"] for c in told["comparisons"] if c["divergence"])
    assert 0 < found["position"] < 24
    assert found["on_id"] != found["off_id"]
    assert found["margin"] >= 0


def test_a_wrong_walk_is_caught(model: str, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "walk", accept_a_wrong_child)
    result = verify(model, "--dataset", str(dataset))
    assert result.exit_code == 1, result.output
    assert re.search(r"DIFFERENT from token \d+ on: \d+ '.*' with speculation, \d+ '.*' without; top-2", result.stdout)


def test_only_near_ties_are_excused_and_only_in_fast_numerics() -> None:
    tie = Divergence(position=3, on_id=1, off_id=2, on_text="a", off_text="b", margin=TIE_MARGIN / 2)
    same = Comparison(
        prompt=0, text="", temperature=0.0, batched=False, num_tokens=4, speculation=SpeculationStats(), divergence=None
    )  # fmt: skip
    exact = Proof(numerics="exact", environment="", drafter="ngram", comparisons=(same, replace(same, divergence=tie)))
    assert exact.num_tie_flips == 1
    assert not exact.holds
    fast = replace(exact, numerics="fast")
    assert fast.holds
    far = replace(same, divergence=replace(tie, margin=2 * TIE_MARGIN))
    assert not replace(fast, comparisons=(far,)).holds
    ended = replace(same, divergence=replace(tie, off_id=None, margin=None))
    assert not replace(fast, comparisons=(ended,)).holds


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "x"}', '{"turns": []}', '{"prompt": 3}', '{"prompt": ""}', "7"])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path)


def test_a_dataset_must_hold_something(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        read_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "missing.jsonl")


def test_off_is_no_drafter_to_prove() -> None:
    result = CliRunner().invoke(app, ["verify", "--drafter", "off"])
    assert isinstance(result.exception, ConfigError)


def test_our_own_prompts_are_different() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) == 12
