"""The head that comes with specserve: small, of known origin, for the demo model, and worth its tokens there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from specserve_drafts.eagle import SHIPPED_HEADS
from specserve_drafts.eagle_checkpoint import read_fingerprint
from specserve_drafts.successors import SUCCESSORS_FILE

from specserve.llm import LLM
from specserve.request import SamplingParams, SpeculationParams

PROMPTS = [
    "Explain in three sentences why the sky is blue.",
    "A train drives 60 km in one hour. How far does it drive in 7 hours? Explain step by step.",
]

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def llm(demo_folder: Path) -> LLM:
    return LLM("demo", max_model_len=512)


@pytest.mark.parametrize("folder", sorted(SHIPPED_HEADS.iterdir()), ids=lambda folder: folder.name)
def test_it_is_small_and_says_where_it_comes_from(folder: Path) -> None:
    assert (folder / "model.safetensors").stat().st_size <= 12 * 1024**2
    assert (folder / SUCCESSORS_FILE).is_file()
    about = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    assert {"command", "prompts", "hours", "acceptance", "target_fingerprint"} <= about.keys()
    assert all(len(prompts["sha256"]) == 64 for prompts in about["prompts"])


def test_it_is_found_for_the_demo_model_and_read_as_it_was_trained(llm: LLM) -> None:
    built = llm.built
    assert "eagle" in built.engine.drafting.drafters and "an EAGLE head" in " ".join(built.startup_lines)
    [agrees] = [line for line in built.startup_lines if line.startswith("EAGLE head:")]
    assert int(agrees.split(" at ")[1].split("%")[0]) >= 30, "one line: no warning"
    fingerprints = [read_fingerprint(folder) for folder in SHIPPED_HEADS.iterdir()]
    assert len(set(fingerprints)) == len(fingerprints)


def test_it_drafts_what_the_model_says_and_changes_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48)

    def answers(drafter: str, nodes: int) -> tuple[list[tuple[int, ...]], float]:
        speculation = SpeculationParams(drafter=drafter, num_draft_tokens=nodes)
        prompts = [llm.built.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
        found = llm.generate([tuple(ids) for ids in prompts], params, speculation=speculation)
        stats = [answer.outputs[0].metrics.speculation for answer in found]
        steps, committed = sum(s.num_steps for s in stats), sum(s.num_committed_tokens for s in stats)
        return [answer.outputs[0].token_ids for answer in found], committed / steps

    plain, _ = answers("off", 0)
    drafted, length = answers("eagle", 15)
    assert drafted == plain and length > 1.5
