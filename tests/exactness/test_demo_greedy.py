"""The demo model in fp32, greedy: the engine's ids equal `transformers.generate`, with speculation off and on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specserve import LLM, SamplingParams, SpeculationParams

PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that reverses a list, and a test for it.",
    "Repeat this line three times: the quick brown fox jumps over the lazy dog.",
    "Translate to German: good morning, my friend.",
    "Count from one to twenty in words.",
    "Explain in two sentences why the sky is blue.",
    "List five fruits, one per line.",
    "What is 17 times 23? Show the steps.",
    "Write a short story about a lighthouse keeper.",
    "Summarize: The meeting was moved from Monday to Tuesday because the room was taken.",
    "Name the planets of the solar system in order.",
    "Give me a JSON object with the keys name and age.",
    "Who wrote Hamlet, and when?",
    "Write a limerick about a cat.",
    "How do I boil an egg?",
    "def fibonacci(n):",
    "Describe the water cycle to a child.",
    "What are the primary colours?",
    "Write an email that asks for a day off.",
    "Once upon a time, in a village by the sea,",
]


def compare(folder: Path, prompts: list[str], max_tokens: int) -> int:
    """Asserts equality; returns how many drafts were accepted on the way."""
    from transformers import AutoModelForCausalLM

    llm = LLM(str(folder), dtype="float32", kv_cache_gib=1.0)
    eos = list(llm.built.tokenizer.eos_token_ids)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    accepted = 0
    for prompt in prompts:
        ids = llm.built.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        with torch.inference_mode():
            expected = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=eos,
                pad_token_id=eos[0],
            )[0, len(ids) :].tolist()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        for drafter in ("off", "ngram"):
            output = llm.generate([ids], params, speculation=SpeculationParams(drafter=drafter))[0]
            assert list(output.outputs[0].token_ids) == expected, (prompt, drafter)
            accepted += output.metrics.speculation.num_accepted_tokens
    return accepted


@pytest.mark.demo
def test_greedy_ids_equal_transformers(demo_folder: Path) -> None:
    assert compare(demo_folder, PROMPTS[:4], 32) > 0


@pytest.mark.slow
@pytest.mark.demo
@pytest.mark.timeout(1200)
def test_greedy_ids_equal_transformers_at_length(demo_folder: Path) -> None:
    assert compare(demo_folder, PROMPTS, 64) > 0
