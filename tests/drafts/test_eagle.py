"""The EAGLE drafter in the shared pool: its drafts are the head's own, whatever became of the sequence before."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import specserve_kernels
import torch
from cells import SITUATIONS, request
from eagle_files import Tensors, head_config, head_tensors, near_perfect_head, write_head, write_one_layer_target
from eagle_reference import Reference
from harness import EngineHarness
from specserve_drafts import draft_footprint, draft_rows, eagle, make_drafter
from specserve_drafts.eagle import EagleDrafter, load_eagle, shipped_head
from specserve_drafts.eagle_check import check_head
from specserve_drafts.eagle_checkpoint import HeadCheckpoint, load_checkpoint
from specserve_drafts.eagle_head import EagleHead
from specserve_drafts.grow import Shape
from specserve_kernels import PURPOSE_TARGET, AttentionRows
from torch import Tensor

from specserve.batch import StepBatch
from specserve.config import EngineConfig, SpeculationConfig
from specserve.errors import ConfigError, ModelError
from specserve.models.decoder import Decoder
from specserve.models.weights import load_decoder
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.runner import CpuRunner

KERNELS = os.environ.get("SPECSERVE_TEST_KERNELS", "auto")
CHAIN = Shape(width=1, branch=1, depth=5)
TREE = Shape(width=3, branch=3, depth=4)
WINDOW = 2048


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_one_layer_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Decoder:
    return load_decoder(target_folder, specserve_kernels.load(KERNELS))


@pytest.fixture(scope="module")
def head_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), *near_perfect_head(target_folder))


@pytest.fixture(scope="module")
def random_head(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Tensors, Path]:
    """A head with nothing to say: every number matters, and it is as wrong as can be."""
    config = json.loads((target_folder / "config.json").read_text())
    head = head_config(config, eagle_aux_hidden_state_layer_ids=[1], num_hidden_layers=2, norm_output=True)
    tensors = head_tensors(head, num_features=1)
    return head, tensors, write_head(tmp_path_factory.mktemp("random"), head, tensors)


class Hand:
    """A runner and one sequence over shuffled pages, moved by hand."""

    def __init__(self, target: Decoder, page_size: int = 4, num_pages: int = 48) -> None:
        self.runner = CpuRunner(target, target.ops, num_pages, page_size)
        self.pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5)).tolist()

    def slots(self, start: int, stop: int) -> Tensor:
        size = self.runner.page_size
        return torch.tensor([self.pages[i // size] * size + i % size for i in range(start, stop)])

    def feed(self, ids: Sequence[int], start: int) -> None:
        """Tokens at slots start, start + 1, …"""
        stop = start + len(ids)
        rows = AttentionRows(
            sequence=torch.zeros(len(ids), dtype=torch.int32),
            prefix_len=torch.arange(start + 1, stop + 1, dtype=torch.int32),
            tail_slots=torch.zeros(len(ids), 0, dtype=torch.int32),
            tail_len=torch.zeros(len(ids), dtype=torch.int32),
            page_table=torch.tensor([self.pages], dtype=torch.int32),
        )
        self.runner.forward(
            StepBatch(
                ids=torch.tensor(ids),
                positions=torch.arange(start, stop),
                slots=self.slots(start, stop),
                attention=rows,
                logit_rows=torch.empty(0, dtype=torch.int64),
                spans=(),
            )
        )

    def row(self, ids: Sequence[int], name: str = "s", prompt_len: int | None = None, **fields: Any) -> DraftRow:
        """The sequence whose last token is the root."""
        known: dict[str, Any] = {"seed": 3, "choice": 0, "temperature": 0.0, "salt": ""} | fields
        return DraftRow(name, ids, prompt_len or len(ids) - 1, len(ids) - 1, pages=self.pages, **known)


def ids_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def drafter_of(hand: Hand, folder: Path, shape: Shape = CHAIN, window: int = WINDOW) -> EagleDrafter:
    target = hand.runner.decoder
    return EagleDrafter(hand.runner, EagleHead(load_checkpoint(folder, target.config), target), window, shape)


class Expected:
    """What a chain must be: the definition in fp64, over the features that one whole forward of the target gives."""

    def __init__(self, target: Decoder, config: dict[str, Any], tensors: Tensors, checkpoint: HeadCheckpoint) -> None:
        self.target = target
        self.reference = Reference(config, tensors, target.weights.embed.raw)
        self.lm_head = tensors.get("lm_head.weight", target.weights.head.raw).double()
        self.layers = checkpoint.config.feature_layers
        self.target_ids = checkpoint.target_ids
        if checkpoint.target_ids is None:
            self.target_ids = torch.arange(target.config.vocab_size)
        elif "lm_head.weight" not in tensors:
            self.lm_head = self.lm_head[checkpoint.target_ids]

    def features(self, ids: Sequence[int]) -> Tensor:
        hand = Hand(self.target)
        hand.runner.kept.keep(hidden=True, feature_layers=self.layers)
        hand.feed(ids, 0)
        slots = hand.slots(0, len(ids))
        return hand.runner.kept.features(slots) if self.layers else hand.runner.kept.hidden(slots)

    def chain(self, ids: Sequence[int], length: int, start: int = 1, noise: Any = None) -> list[int]:
        """Best first tokens after `ids`, whose last is the root; the head sees slots from `start` on."""
        assert self.target_ids is not None
        rows = list(ids[start:])
        hidden = self.reference.fuse(self.features(ids[:-1]))[start - 1 :]
        chain: list[int] = []
        for _ in range(length):
            count = len(rows)
            positions = torch.arange(start, start + count)
            visible = torch.ones(count, count).tril().bool()
            fed_back, normed = self.reference.run(torch.tensor(rows), hidden, positions, visible)
            scores = normed[-1] @ self.lm_head.T
            if noise is not None:
                scores = noise(scores, len(ids) + len(chain), self.target_ids)
            best = scores.topk(2).values
            assert best[0] - best[1] > 1e-4, "a tie: choose other tokens"
            chain.append(int(self.target_ids[scores.argmax()]))
            rows.append(chain[-1])
            hidden = torch.cat((hidden, fed_back[-1:]))
        return chain


@pytest.fixture(scope="module")
def expected(target: Decoder, random_head: tuple[dict[str, Any], Tensors, Path]) -> Expected:
    config, tensors, folder = random_head
    return Expected(target, config, tensors, load_checkpoint(folder, target.config))


def chain_of(tree: DraftTree) -> list[int]:
    assert tree.parents == tuple(range(-1, len(tree) - 1))
    return list(tree.token_ids)


# ---- what is drafted


@pytest.mark.parametrize("length", [2, 4, 5, 16, 31])
def test_a_chain_is_the_definition(
    target: Decoder, random_head: tuple[dict[str, Any], Tensors, Path], expected: Expected, length: int
) -> None:
    """Slot 0, which has no features, is seen by nobody; prompts end inside and at the end of pages."""
    hand, ids = Hand(target), ids_of(length, seed=length)
    drafter = drafter_of(hand, random_head[2])
    hand.feed(ids[:-1], 0)
    [tree] = drafter.propose([hand.row(ids)], [4])
    found = chain_of(tree)
    assert len(found) >= 2
    assert found == expected.chain(ids, len(found))


def test_eagle1_reads_the_last_hidden_states(target: Decoder, target_folder: Path, tmp_path: Path) -> None:
    config = head_config(json.loads((target_folder / "config.json").read_text()))
    tensors = head_tensors(config, eagle1=True, bias=True)
    del config["draft_vocab_size"]
    folder = write_head(tmp_path, config, tensors)
    hand, ids = Hand(target), ids_of(23)
    drafter = drafter_of(hand, folder)
    hand.feed(ids[:-1], 0)
    [tree] = drafter.propose([hand.row(ids)], [4])
    found = chain_of(tree)
    assert len(found) >= 2
    assert found == Expected(target, config, tensors, load_checkpoint(folder, target.config)).chain(ids, len(found))


def test_a_window_begins_with_a_page(
    target: Decoder, random_head: tuple[dict[str, Any], Tensors, Path], expected: Expected
) -> None:
    hand, ids = Hand(target), ids_of(31)
    drafter = drafter_of(hand, random_head[2], window=10)
    hand.feed(ids[:-1], 0)
    # beside a short sequence, whose filling begins at slot 0
    short, tree = drafter.propose([hand.row(ids[:9], "short"), hand.row(ids)], [3, 3])
    found = chain_of(tree)
    assert found == expected.chain(ids, len(found), start=20)
    assert found != expected.chain(ids, len(found))
    assert chain_of(short) == expected.chain(ids[:9], len(short))


def test_chunks_whole_and_prefix_hits_give_the_same_trees(
    target: Decoder, random_head: tuple[dict[str, Any], Tensors, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of(40)

    def drafted(chunk: int, rows_a_call: int) -> tuple[DraftTree, int, Hand, EagleDrafter]:
        monkeypatch.setattr(draft_rows, "FILL_ROWS", rows_a_call)
        hand = Hand(target)
        drafter = drafter_of(hand, random_head[2], TREE)
        for start in range(0, len(ids) - 1, chunk):
            hand.feed(ids[start : min(start + chunk, len(ids) - 1)], start)
        num_calls, tree = 0, DraftTree()
        while not len(tree):
            [tree] = drafter.propose([hand.row(ids)], [9])
            num_calls += 1
        return tree, num_calls, hand, drafter

    small, num_calls, *_ = drafted(7, 6)
    assert num_calls == 7  # 39 committed tokens and the root
    whole, num_calls, hand, drafter = drafted(40, 512)
    assert num_calls == 1 and len(whole) == 9
    assert small == whole
    # another sequence holds the same pages: nothing but its root is run
    ran = []
    forward = drafter.head.forward
    monkeypatch.setattr(drafter.head, "forward", lambda ids, *rest: ran.append(len(ids)) or forward(ids, *rest))
    assert drafter.propose([hand.row(ids, "other")], [9]) == [whole]
    assert ran[0] < 4 + 1
    # the target's pages were computed by somebody else, before any drafter looked at them
    late = Hand(target)
    late_drafter = drafter_of(late, random_head[2], TREE)
    late.feed(ids[:-1], 0)
    late.feed(ids[36:-1], 36)  # the hit was whole pages
    assert late_drafter.propose([late.row(ids, prompt_len=37)], [9]) == [whole]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_noise_is_that_of_the_targets_ids(
    target: Decoder, random_head: tuple[dict[str, Any], Tensors, Path], expected: Expected, temperature: float
) -> None:
    hand, ids = Hand(target), ids_of(12)
    drafter = drafter_of(hand, random_head[2])
    hand.feed(ids[:-1], 0)
    reference = specserve_kernels.load("reference")

    def perturbed(scores: Tensor, draw_index: int, ids: Tensor) -> Tensor:
        keys = (torch.tensor([value]) for value in (2**62 + 5, draw_index, 2))
        return scores / temperature + reference.noise(*keys, PURPOSE_TARGET, target.config.vocab_size)[0, ids]

    row = hand.row(ids, seed=2**62 + 5, choice=2, temperature=temperature)
    [tree] = drafter.propose([row], [4])
    found = chain_of(tree)
    assert found == expected.chain(ids, len(found), noise=perturbed)
    assert found != expected.chain(ids, len(found))


# ---- in an engine


class Recorder(EagleDrafter):
    """Remembers what it drafted after which tokens, and learns nothing from what became of it."""

    seen: dict[tuple[tuple[int, ...], int], DraftTree]

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        trees = super().propose(rows, caps)
        self.seen |= {(tuple(row.token_ids), cap): tree for row, cap, tree in zip(rows, caps, trees, strict=True)}
        return trees

    def observe(self, view: DraftRow, result: StepResult) -> None:
        self._trees.forget(view.sequence_id)


def engine_with(
    target_folder: Path,
    head_folder: Path,
    shape: Shape,
    options: dict[str, Any],
    kind: type[EagleDrafter] = EagleDrafter,
) -> tuple[EngineHarness, EagleDrafter]:
    """The drafter takes the n-gram drafter's seat."""
    harness = EngineHarness(target_folder, "ngram", **options)
    runner: Any = harness.engine._runner
    checkpoint = load_checkpoint(head_folder, runner.decoder.config)
    drafter = kind(runner, EagleHead(checkpoint, runner.decoder), WINDOW, shape)
    harness.engine.drafting.drafters["ngram"] = drafter
    return harness, drafter


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_on_equals_off(target_folder: Path, head_folder: Path, situation: str, mode: str) -> None:
    made = SITUATIONS[situation]
    requests = made.requests(mode)
    options = {"num_draft_tokens": 9, **made.options}
    off = EngineHarness(target_folder, **options).run(requests, made.arrivals)
    harness, _ = engine_with(target_folder, head_folder, TREE, options)
    on = harness.run(requests, made.arrivals)
    assert on.answers == off.answers
    made.claim(harness, on, {item.request_id: item for item in requests})
    told = [end.speculation for end in on.finished.values()]
    assert harness.engine.metrics.num_drafter_faults == 0
    drafted, accepted = sum(s.num_draft_tokens for s in told), sum(s.num_accepted_tokens for s in told)
    assert drafted > accepted > 40  # a head that is nearly right


@pytest.mark.parametrize("situation", ["preempted", "prefix_hit", "n3", "chunked"])
def test_every_draft_is_that_of_a_sequence_without_history(
    target_folder: Path, head_folder: Path, situation: str
) -> None:
    """Compaction, preemption, page hits, forks and copies leave nothing behind in the head's own layers."""
    made = SITUATIONS[situation]
    harness, drafter = engine_with(target_folder, head_folder, TREE, {"num_draft_tokens": 6, **made.options}, Recorder)
    assert isinstance(drafter, Recorder)
    drafter.seen = {}
    harness.run(made.requests("greedy"), made.arrivals)
    assert harness.engine.metrics.num_compacted_slots > 0
    runner: Any = harness.engine._runner
    chosen = list(drafter.seen.items())[::2]
    assert len(chosen) >= 6
    for (ids, cap), drafted in chosen:
        hand = Hand(runner.decoder, runner.page_size)
        hand.runner.kv.fill_(float("nan"))
        fresh = drafter_of(hand, head_folder, TREE)
        hand.feed(ids[:-1], 0)
        assert fresh.propose([hand.row(ids)], [cap]) == [drafted]


def test_a_good_head_is_accepted(target_folder: Path, head_folder: Path) -> None:
    harness, _ = engine_with(target_folder, head_folder, CHAIN, {"num_draft_tokens": 5})
    run = harness.run([request("a", "greedy", tuple(ids_of(40)), max_tokens=60)])
    [end] = run.finished.values()
    assert end.speculation.acceptance_length > 2.0


# ---- which head, and whether it is read as it was trained


def test_a_head_is_found_by_its_targets_fingerprint(
    target: Decoder, head_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle, "SHIPPED_HEADS", tmp_path)
    forward = Hand(target).runner
    config, body = SpeculationConfig(), target.config
    assert shipped_head(target.fingerprint) is None
    assert draft_footprint(EngineConfig(), body, 2, target.fingerprint) == (2 * body.hidden_size, 0)
    with pytest.raises(ConfigError, match=r"no EAGLE head comes with specserve for this model.*set eagle_head"):
        make_drafter("eagle", config, forward)
    head = load_checkpoint(head_folder, target.config)
    raw = json.loads((head_folder / "config.json").read_text())
    for name, fingerprint in (("another", "0" * 64), ("ours", target.fingerprint)):
        write_head(tmp_path / name, raw, {n: t.clone() for n, t in head.tensors.items()})
        (tmp_path / name / "provenance.json").write_text(json.dumps({"target_fingerprint": fingerprint}))
    assert shipped_head(target.fingerprint) == tmp_path / "ours"
    layer = 2 * body.num_key_value_heads * body.head_dim
    assert draft_footprint(EngineConfig(), body, 2, target.fingerprint).per_token == 2 * (body.hidden_size + layer)
    assert isinstance(make_drafter("eagle", config, forward), EagleDrafter)
    with pytest.raises(ModelError, match=rf"trained for a target of fingerprint {'0' * 12}; this one's is"):
        load_eagle(tmp_path / "another", forward, WINDOW)
    load_eagle(head_folder, forward, WINDOW)  # no fingerprint: it is taken at its word


def test_the_check_tells_how_often_a_head_agrees(target: Decoder, head_folder: Path) -> None:
    head = EagleHead(load_checkpoint(head_folder, target.config), target)
    check = check_head(head, target, ids_of(120))
    assert check.num_positions == 119
    assert check.agreement.first > 0.6
    assert check.agreement.second > 0.6
    assert 0.7 < check.coverage < 0.95
    assert check.warning is None


def test_the_check_names_the_option_that_was_misread(target: Decoder, target_folder: Path, tmp_path: Path) -> None:
    config, tensors = near_perfect_head(target_folder)
    write_head(tmp_path, config | {"norm_before_residual": False}, tensors)
    misread = EagleHead(load_checkpoint(tmp_path, target.config), target)
    warning = check_head(misread, target, ids_of(120)).warning
    assert warning is not None
    assert "with norm_before_residual = true it would agree at" in warning
    assert "norm_output" not in warning


def test_the_check_says_that_a_head_is_of_no_use(
    target: Decoder, random_head: tuple[dict[str, Any], Tensors, Path]
) -> None:
    head = EagleHead(load_checkpoint(random_head[2], target.config), target)
    check = check_head(head, target, ids_of(120))
    assert check.agreement.first < 0.1
    assert check.warning is not None and "likely causes" in check.warning
