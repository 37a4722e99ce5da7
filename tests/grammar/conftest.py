"""Compilers for two vocabularies: a byte-level one of 300 tokens, and the demo model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_tokenizer

pytest.importorskip("llguidance")

from specserve.constraint import GrammarSpec
from specserve.grammar import GrammarCompiler, GrammarState, allowed_ids
from specserve.proposal import DraftTree
from specserve.tokenizer import Tokenizer

TINY_EOS = (2, 0)
# as a model whose logits are padded: these ids are no tokens
PADDING = 7


@dataclass
class Vocab:
    compiler: GrammarCompiler
    vocab_size: int
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]

    def start(self, kind: str, value: str | tuple[str, ...] = "") -> GrammarState:
        return self.compiler.compile(GrammarSpec(kind, value)).get(60).start()

    def rows(self, state: GrammarState, tree: DraftTree) -> list[set[int]]:
        """Allowed ids of every row."""
        masks = allowed_ids(state.masks(tree), self.vocab_size)
        return [set(np.flatnonzero(row).tolist()) for row in masks]

    def allowed(self, state: GrammarState) -> set[int]:
        return self.rows(state, DraftTree())[0]


@pytest.fixture(scope="session")
def tiny() -> Iterator[Vocab]:
    tokenizer = tiny_tokenizer()
    size = tokenizer.get_vocab_size() + PADDING
    compiler = GrammarCompiler(tokenizer.to_str(), size, TINY_EOS)
    yield Vocab(compiler, size, lambda text: tokenizer.encode(text).ids, tokenizer.decode)
    compiler.close()


@pytest.fixture(scope="session")
def demo(demo_folder: Path) -> Iterator[Vocab]:
    tokenizer = Tokenizer(demo_folder)
    source = (demo_folder / "tokenizer.json").read_text(encoding="utf-8")
    compiler = GrammarCompiler(source, tokenizer.vocab_size, tokenizer.eos_token_ids)
    yield Vocab(compiler, tokenizer.vocab_size, tokenizer.encode, tokenizer.decode)
    compiler.close()
