"""A drafter that heard nothing of 500 tokens is soon as good as one that was always asked.

The demo model answers our own prompts, without loops. The same answers are made twice: with five nodes a step from the
start, and with none until token 500. What is compared is the acceptance length from 64 tokens after that on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import EngineHarness
from specserve_drafts.auto import AutoDrafter

from specserve.prompts import OWN_PROMPTS, read_prompts
from specserve.proposal import StepResult
from specserve.request import Request, SamplingParams, SpeculationParams
from specserve.tokenizer import Tokenizer

pytestmark = [pytest.mark.demo, pytest.mark.slow, pytest.mark.timeout(1800)]

NODES, PAUSE, FROM, TO = 5, 500, 564, 900
NUM_PROMPTS = 12


class Stand:
    """An engine in which no sequence drafts until it has `pause` tokens, and the count of what comes later."""

    def __init__(self, folder: Path, drafter: str) -> None:
        self.pause = 0
        self._drafter = drafter
        harness = EngineHarness(
            folder, drafter, num_draft_tokens=NODES, max_num_seqs=NUM_PROMPTS, num_pages=1024, debug=False
        )
        self._harness, drafting = harness, harness.engine.drafting
        auto = drafting.drafters["auto"]
        if isinstance(auto, AutoDrafter):  # what a part costs on this machine is not the question here
            for payback in auto.paybacks.values():
                payback.asks = lambda: True  # type: ignore[method-assign]
        scheduler, observe = harness.engine.scheduler, drafting.observe
        budgets = scheduler.budgets

        def paused(roots: Sequence[Any], num_prompt_rows: int) -> list[int]:
            caps = budgets(roots, num_prompt_rows)
            return [cap if s.num_output >= self.pause else 0 for s, cap in zip(roots, caps, strict=True)]

        def observed(sequence: Any, step: StepResult) -> None:
            if FROM <= sequence.num_output < TO:
                self.steps += 1
                self.tokens += len(step.tokens)
            observe(sequence, step)

        scheduler.budgets = paused
        drafting.observe = observed  # type: ignore[method-assign]

    def acceptance_length(self, prompts: Sequence[tuple[int, ...]], pause: int) -> float:
        self.pause, self.steps, self.tokens = pause, 0, 0
        params = SamplingParams(temperature=0.0, max_tokens=TO, ignore_eos=True, repetition_penalty=1.1)
        asked = [
            Request(
                request_id=f"{pause}-{number}",
                prompt_token_ids=prompt,
                params=params,
                speculation=SpeculationParams(drafter=self._drafter),
                cache_salt=f"{pause}-{number}",  # what others said cannot help
            )
            for number, prompt in enumerate(prompts)
        ]
        run = self._harness.run(asked)
        drafted = [end.speculation.num_drafts for end in run.finished.values()]
        steps = [end.speculation.num_steps for end in run.finished.values()]
        assert all(0 < count <= most for count, most in zip(drafted, steps, strict=True))
        assert not pause or all(most - count >= pause - 1 for count, most in zip(drafted, steps, strict=True))
        return self.tokens / self.steps


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "recycling", "eagle", "auto"])
def test_a_pause_is_made_up_for(demo_folder: Path, drafter: str) -> None:
    tokenizer = Tokenizer(demo_folder)
    texts = [text for _, text in read_prompts(OWN_PROMPTS)]
    chosen = texts[:: len(texts) // NUM_PROMPTS][:NUM_PROMPTS]
    prompts = [tuple(tokenizer.encode_chat([{"role": "user", "content": text}])) for text in chosen]
    stand = Stand(demo_folder, drafter)
    always, paused = stand.acceptance_length(prompts, 0), stand.acceptance_length(prompts, PAUSE)
    print(f"{drafter}: acceptance length {always:.3f} never off, {paused:.3f} after {PAUSE} tokens off")
    assert always > 1.05 and paused >= 0.95 * always
