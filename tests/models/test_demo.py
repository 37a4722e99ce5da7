"""The converted demo model is the model it claims to be: transformers loads the same folder and agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import specserve_kernels
import torch
from paged import Paged, difference

from specserve.models.decoder import Decoder
from specserve.models.weights import load_decoder
from specserve.tokenizer import Tokenizer

pytestmark = [pytest.mark.demo, pytest.mark.filterwarnings("ignore")]

MIXED = "Hello, world!\n\n  def f(x): return 12345 + x\t# été 🙂👩‍👩‍👧 日本語 <|im_end|> it's  don't\r\n1,000.50…"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def tokenizer(demo_folder: Path) -> Tokenizer:
    return Tokenizer(demo_folder)


@pytest.fixture(scope="module")
def decoder(demo_folder: Path) -> Decoder:
    return load_decoder(demo_folder, specserve_kernels.load("auto"), "float32")


def test_tokenizer_equals_transformers(demo_folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(demo_folder)
    ids = tokenizer.encode(MIXED)
    assert ids == theirs(MIXED)["input_ids"]
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == MIXED.replace("<|im_end|>", "")
    expected = theirs.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.encode_chat(QUESTION) == expected
    assert tokenizer.vocab_size == len(theirs) == 49152
    assert tokenizer.eos_token_ids == (2,)


def test_logits_equal_transformers(demo_folder: Path, tokenizer: Tokenizer, decoder: Decoder) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32).eval()
    ids = tokenizer.encode_chat(QUESTION)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert difference(Paged(decoder).chunk(ids, 0), expected) <= 1e-3


def test_it_answers(tokenizer: Tokenizer, decoder: Decoder) -> None:
    ids = tokenizer.encode_chat(QUESTION)
    paged = Paged(decoder)
    logits = paged.chunk(ids, 0)
    answer: list[int] = []
    while len(answer) < 12:
        token_id = int(logits[-1].argmax())
        if token_id in tokenizer.eos_token_ids:
            break
        answer.append(token_id)
        logits = paged.chunk([token_id], len(ids) + len(answer) - 1)
    assert "Paris" in tokenizer.decode(answer)
