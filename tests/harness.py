"""An engine with any drafter inside, driven step by step and watched.

`EngineHarness.build` is the one place that knows how an engine is put together; all else talks to
submit / step and to the plans that the scheduler makes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specserve.build import build
from specserve.config import EngineConfig
from specserve.engine import Engine
from specserve.events import Delta, Failed, Finished, Started
from specserve.proposal import Drafter
from specserve.request import Request

MAX_STEPS = 5000
EOS_IDS = [0, 2, *range(150, 162)]


def sharpen(source: Path, target: Path, factor: float = 3.0) -> Path:
    """A copy of an untied model folder with logits `factor` times as large: fewer near-ties, more repetition.

    Its list of EOS ids is long, so that hot answers do end by one.
    """
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"] * factor
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_IDS}))
    return target


def blur(source: Path, target: Path, spread: float) -> Path:
    """A copy of a model folder, a little off: each tensor by noise of `spread` times its own deviation."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(target / "model.safetensors")
    off = {name: w + spread * w.std() * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(off, target / "model.safetensors", metadata={"format": "pt"})
    return target


@dataclass
class Run:
    """The outcome of some requests, by sequence id (`request_id/choice`)."""

    answers: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, list[Any]] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=dict)  # tokens of each step that told some
    finished: dict[str, Finished] = field(default_factory=dict)
    started: dict[str, Started] = field(default_factory=dict)
    failed: dict[str, Failed] = field(default_factory=dict)
    chunks: Counter[str] = field(default_factory=Counter)  # by sequence, up to its first token

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
            self.sizes.setdefault(key, []).append(len(event.tokens))
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

    def __init__(self, folder: Path | str, drafter: Drafter | str = "off", **options: Any) -> None:
        self.engine = self.build(folder, drafter, options)
        self.chunks: Counter[str] = Counter()
        self.preempted: Counter[str] = Counter()  # times, by sequence
        self.max_sequences = 0  # in one step
        self._watch()

    @staticmethod
    def build(folder: Path | str, drafter: Drafter | str, options: Mapping[str, Any]) -> Engine:
        """An engine; a drafter object takes the n-gram drafter's seat, a name is taken as it is.

        Trees have 5 nodes unless a test says otherwise: what is drafted must not depend on this machine's seconds.
        """
        name = drafter if isinstance(drafter, str) else "ngram"
        kernels = os.environ.get("SPECSERVE_TEST_KERNELS", "auto")
        flat = {"drafter": name, "num_draft_tokens": 5, "num_pages": 256, "debug": True, "kernels": kernels}
        flat |= dict(options)
        engine = build(EngineConfig.from_options(model=str(folder), **flat)).engine
        if not isinstance(drafter, str):
            engine.drafting.drafters["ngram"] = drafter
        return engine

    def _watch(self) -> None:
        scheduler = self.engine.scheduler
        plan = scheduler.plan

        def watched(*args: Any, **kwargs: Any) -> Any:
            step = plan(*args, **kwargs)
            self.max_sequences = max(self.max_sequences, len(step.rows))
            self.preempted.update(sequence.sequence_id for sequence in step.preempted)
            self.chunks.update(rows.sequence.sequence_id for rows in step.rows if not rows.sequence.has_token)
            return step

        scheduler.plan = watched  # type: ignore[method-assign]

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
        outcome = Run(chunks=self.chunks)
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
