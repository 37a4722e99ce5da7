"""An engine on a tiny random Llama with any drafter inside, driven step by step and watched.

`EngineHarness.build` is the one place that knows how an engine is put together; all else talks to
submit / step and to the plans that the scheduler makes. The tiny model's tokenizer is one id per byte, so random
answers are full of broken characters, and its weights are scaled so that answers are neither constant nor free
of repetition and near-ties are rare.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specserve.config import EngineConfig, ModelLimits
from specserve.engine import Engine
from specserve.proposal import Drafter
from specserve.request import Delta, Failed, Finished, Request, Started
from specserve.runner import CpuRunner
from specserve.tokenizer import Tokenizer

VOCAB_SIZE = 262  # 256 bytes, bos, eos, four spare
BOS, EOS = 256, 257
MAX_STEPS = 5000


def save_tiny_llama(folder: Path, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Path:
    """Write config, safetensors and a byte tokenizer; the same seed gives the same model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(6)  # peaked enough that drafts are sometimes right
        model.model.embed_tokens.weight.mul_(3)  # mostly about the last token, so that n-grams recur
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def save_byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: id = byte, then the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.add_tokens([f"<spare{i}>" for i in range(VOCAB_SIZE - 258)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@dataclass
class Observed:
    """What the scheduler's plans showed while a run lasted."""

    num_preemptions: int = 0
    num_copies: int = 0
    max_step_rows: int = 0
    chunks: Counter[str] = field(default_factory=Counter)  # by sequence, before its first token


@dataclass
class Run:
    """The outcome of some requests, by sequence id (`request_id/choice`)."""

    answers: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, list[Any]] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    started: dict[str, Started] = field(default_factory=dict)
    failed: dict[str, Failed] = field(default_factory=dict)
    observed: Observed = field(default_factory=Observed)

    def full(self, requests: Iterable[Request]) -> dict[str, list[int]]:
        """Prompt and answer of each sequence: what the knowing drafters are given."""
        prompts = {request.request_id: list(request.prompt_token_ids) for request in requests}
        return {key: prompts[key.rsplit("/", 1)[0]] + ids for key, ids in self.answers.items()}

    def note(self, event: Any) -> None:
        if isinstance(event, Started):
            self.started[event.request_id] = event
        elif isinstance(event, Failed):
            self.failed[event.request_id] = event
        elif isinstance(event, Delta):
            key = f"{event.request_id}/{event.index}"
            self.tokens.setdefault(key, []).extend(event.tokens)
            self.answers.setdefault(key, []).extend(token.token_id for token in event.tokens)
            self.texts[key] = self.texts.get(key, "") + "".join(token.text for token in event.tokens)
        elif isinstance(event, Finished):
            key = f"{event.request_id}/{event.index}"
            assert key not in self.finished, f"{key} finished twice"
            self.finished[key] = event
            self.answers.setdefault(key, [])
            self.texts[key] = self.texts.get(key, "") + event.tail_text


class EngineHarness:
    """One engine, its drafter, and a watch on its plans."""

    def __init__(self, folder: Path | str, drafter: Drafter | None = None, **options: Any) -> None:
        self.engine = self.build(folder, drafter, options)
        self.observed = Observed()
        self._watch()

    @staticmethod
    def build(folder: Path | str, drafter: Drafter | None, options: Mapping[str, Any]) -> Engine:
        """Put an engine together as build.py does, with one drafter of the test's in the n-gram drafter's seat."""
        import specserve_kernels
        from specserve.models.weights import load_decoder

        flat = {"drafter": "off" if drafter is None else "ngram", "num_pages": 256, "debug": True} | dict(options)
        config = EngineConfig.from_options(model=str(folder), **flat)
        ops = specserve_kernels.load(config.kernels)
        decoder = load_decoder(Path(folder), ops, config.dtype)
        tokenizer = Tokenizer(Path(folder))
        num_pages, page_size = config.cache.num_pages or 256, config.cache.page_size
        limits = ModelLimits(
            vocab_size=decoder.config.vocab_size,
            max_model_len=config.max_model_len or decoder.config.max_position_embeddings,
            pool_tokens=num_pages * page_size,
            page_size=page_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            eos_token_ids=tokenizer.eos_token_ids,
        )
        runner = CpuRunner(decoder, ops, num_pages, page_size)
        return Engine(config, limits, runner, ops, tokenizer, {} if drafter is None else {"ngram": drafter})

    def _watch(self) -> None:
        scheduler = self.engine.scheduler
        plan = scheduler.plan

        def watched(*args: Any, **kwargs: Any) -> Any:
            step = plan(*args, **kwargs)
            self.observed.num_preemptions += len(step.preempted)
            self.observed.num_copies += len(step.copies)
            num_rows = sum(rows.num_pending + rows.node_cap for rows in step.rows)
            self.observed.max_step_rows = max(self.observed.max_step_rows, num_rows)
            for rows in step.rows:
                if not rows.sequence.has_token:
                    self.observed.chunks[rows.sequence.sequence_id] += 1
            return step

        scheduler.plan = watched

    def run(
        self,
        requests: Sequence[Request],
        arrival_steps: Mapping[str, int] | None = None,
        may_fail: bool = False,
    ) -> Run:
        """Submit each request at its step (default: the first) and step until all have ended.

        Raises:
            The error of a request that failed, unless `may_fail`.
        """
        outcome = Run(observed=self.observed)
        arrival_steps = arrival_steps or {}
        waiting = sorted(requests, key=lambda request: arrival_steps.get(request.request_id, 0))
        for step in range(MAX_STEPS):
            while waiting and arrival_steps.get(waiting[0].request_id, 0) <= step:
                self.engine.submit(waiting.pop(0))
            for event in self.engine.step():
                outcome.note(event)
            if not waiting and not self.engine.has_work():
                break
        else:
            raise AssertionError(f"not done after {MAX_STEPS} steps")
        self.check_whole()
        for failed in outcome.failed.values():
            if not may_fail:
                raise failed.error
        return outcome

    def check_whole(self) -> None:
        """No page leaked and the counts add up."""
        pool = self.engine.pool
        pool.check()
        assert pool.num_referenced == 0, f"{pool.num_referenced} pages are still held by an idle engine"
