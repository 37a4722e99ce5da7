"""A draft model in the shared pool: its drafts are those of a sequence without history, whatever became of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import specserve_kernels
import torch
from cells import MODES, SITUATIONS, prompt, request
from harness import EngineHarness, Run, blur, sharpen
from safetensors.torch import load_file, save_file
from specserve_drafts import draft_rows, make_drafter
from specserve_drafts.draft_model import DraftModelDrafter, load_draft_model, num_shared_ids, token_strings
from specserve_drafts.draft_rows import DraftBatch
from specserve_drafts.grow import Shape
from torch import Tensor

from specserve.build import resolve
from specserve.config import EngineConfig, SpeculationConfig
from specserve.errors import ConfigError, ModelNotFound
from specserve.models.decoder import Decoder
from specserve.models.weights import load_decoder
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.runner import CpuRunner

CHAIN = Shape(width=1, branch=1, depth=6)
TREE = Shape(width=3, branch=3, depth=4)
WINDOW = 2048
PAGE = 4


@pytest.fixture(scope="module")
def target_folder(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(tiny_llama(tied=False, hidden=64), tmp_path_factory.mktemp("sharp") / "llama")


@pytest.fixture(scope="module")
def near_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return blur(target_folder, tmp_path_factory.mktemp("near") / "llama", 0.03)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Decoder:
    return load_decoder(target_folder, specserve_kernels.load("auto"))


@pytest.fixture(scope="module")
def near(near_folder: Path) -> Decoder:
    return load_decoder(near_folder, specserve_kernels.load("auto"))


class Watched(DraftModelDrafter):
    """Remembers the batches it ran and what it drafted after which tokens, and learns nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.batches: list[DraftBatch] = []
        self.seen: dict[tuple[tuple[int, ...], int, int, float], DraftTree] = {}

    def _hidden(self, batch: DraftBatch) -> Tensor:
        self.batches.append(batch)
        return super()._hidden(batch)

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        trees = super().propose(rows, caps)
        for row, cap, tree in zip(rows, caps, trees, strict=True):
            self.seen[tuple(row.token_ids), cap, row.choice, row.temperature] = tree
        return trees

    def observe(self, view: DraftRow, result: StepResult) -> None:
        self._trees.forget(view.sequence_id)


class Hand:
    """A drafter and pages of its sequences, without an engine: a draft model never reads the target's KV."""

    def __init__(self, target: Decoder, draft: Decoder, shape: Shape = TREE, window: int = WINDOW) -> None:
        self.drafter = Watched(CpuRunner(target, target.ops, 64, PAGE), draft, window, shape=shape)
        self.pages = torch.randperm(64, generator=torch.Generator().manual_seed(5)).tolist()

    def row(self, ids: Sequence[int], name: str = "s", **fields: Any) -> DraftRow:
        """The sequence whose last token is the root."""
        known: dict[str, Any] = {"seed": 3, "choice": 0, "temperature": 0.0, "salt": "", "pages": self.pages} | fields
        return DraftRow(name, ids, known.pop("prompt_len", len(ids) - 1), len(ids) - 1, **known)

    def draft(self, row: DraftRow, cap: int = 9) -> tuple[DraftTree, int]:
        """Its tree, and how many rows were filled in for it."""
        self.drafter.batches.clear()
        [tree] = self.drafter.propose([row], [cap])
        return tree, len(self.drafter.batches[0].ids)


def ids_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- in an engine


def engine_with(
    folder: Path,
    draft: Path,
    shape: Shape,
    options: Mapping[str, Any],
    kind: type[DraftModelDrafter] = DraftModelDrafter,
) -> tuple[EngineHarness, DraftModelDrafter]:
    """The drafter takes the n-gram drafter's seat."""
    harness = EngineHarness(folder, "ngram", **options)
    forward: Any = harness.engine._runner
    drafter = kind(forward, load_decoder(draft, forward.ops), WINDOW, shape=shape)
    harness.engine.drafting.drafters["ngram"] = drafter
    return harness, drafter


def totals(harness: EngineHarness, run: Run) -> tuple[int, int]:
    """(drafted, accepted), of a run in which no draft was lost."""
    assert harness.engine.metrics.num_drafter_faults == 0
    told = [end.speculation for end in run.finished.values()]
    return sum(s.num_draft_tokens for s in told), sum(s.num_accepted_tokens for s in told)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_on_equals_off(target_folder: Path, near_folder: Path, situation: str, mode: str) -> None:
    made = SITUATIONS[situation]
    requests = made.requests(mode)
    options = {"num_draft_tokens": 9, **made.options}
    off = EngineHarness(target_folder, **options).run(requests, made.arrivals)
    harness, _ = engine_with(target_folder, near_folder, TREE, options)
    on = harness.run(requests, made.arrivals)
    assert on.answers == off.answers
    made.claim(harness, on, {item.request_id: item for item in requests})
    drafted, accepted = totals(harness, on)
    assert drafted > accepted > 30


@pytest.mark.parametrize("situation", ["alone", "preempted", "prefix_hit", "chunked", "n3"])
@pytest.mark.parametrize("mode", MODES)
def test_the_target_as_its_own_draft_model_is_always_right(target_folder: Path, situation: str, mode: str) -> None:
    made = SITUATIONS[situation]
    harness, _ = engine_with(target_folder, target_folder, CHAIN, {"num_draft_tokens": 6, **made.options})
    drafted, accepted = totals(harness, harness.run(made.requests(mode), made.arrivals))
    assert accepted == drafted > 50


@pytest.mark.parametrize("situation", ["preempted", "prefix_hit", "n3", "chunked"])
@pytest.mark.parametrize("mode", MODES)
def test_every_draft_is_that_of_a_sequence_without_history(
    target_folder: Path, near_folder: Path, situation: str, mode: str
) -> None:
    """Compaction, preemption, page hits, forks and copies leave nothing behind in the drafter's layers."""
    made = SITUATIONS[situation]
    options = {"num_draft_tokens": 6, **made.options}
    harness, drafter = engine_with(target_folder, near_folder, TREE, options, Watched)
    assert isinstance(drafter, Watched)
    harness.run(made.requests(mode), made.arrivals)
    assert harness.engine.metrics.num_compacted_slots > 0
    forward: Any = harness.engine._runner
    chosen = [item for item in drafter.seen.items() if len(item[1])][::3]
    assert len(chosen) >= 6
    seeds = {item.request_id: item.params.seed for item in made.requests(mode)}
    for (ids, cap, choice, temperature), drafted in chosen:
        hand = Hand(forward.decoder, load_decoder(near_folder, forward.ops))
        fresh = [
            hand.draft(hand.row(ids, str(seed), seed=seed, choice=choice, temperature=temperature), cap)[0]
            for seed in set(seeds.values())
        ]
        assert drafted in fresh


# ---- what is filled in


def test_chunks_whole_and_prefix_hits_give_the_same_trees(
    target: Decoder, near: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of(40)
    hand = Hand(target, near)
    whole, num_rows = hand.draft(hand.row(ids))
    assert num_rows == 40 and len(whole) == 9
    # the same pages in another sequence's hands: what is full is not filled again, the tail is
    assert hand.draft(hand.row(ids, "hit", prompt_len=37)) == (whole, 4)
    assert hand.draft(hand.row(ids[:-3], "shorter")) == (Hand(target, near).draft(hand.row(ids[:-3]))[0], 1)
    # other tokens, or another tenant's: all of it is
    other = [*ids[:9], ids[9] + 1, *ids[10:]]
    assert hand.draft(hand.row(other, "other")) == (Hand(target, near).draft(hand.row(other))[0], 32)
    assert hand.draft(hand.row(ids, "salted", salt="theirs")) == (whole, 40)
    monkeypatch.setattr(draft_rows, "FILL_ROWS", 7)
    hand = Hand(target, near)
    trees = [hand.draft(hand.row(ids))[0] for _ in range(6)]
    assert trees == [*[DraftTree()] * 5, whole]


def test_a_step_costs_its_new_tokens(target: Decoder, near: Decoder) -> None:
    hand, ids = Hand(target, near), ids_of(60)
    for length, new in ((30, 30), (31, 1), (35, 4), (36, 1), (50, 14)):
        tree, num_rows = hand.draft(hand.row(ids[:length], prompt_len=29))
        assert num_rows == new
        assert tree == Hand(target, near).draft(hand.row(ids[:length]))[0]
    # asked again with nothing new, it runs the root again
    assert hand.draft(hand.row(ids[:50], prompt_len=29)) == (tree, 1)


def test_after_a_preemption_all_is_filled_again(target: Decoder, near: Decoder) -> None:
    hand, ids = Hand(target, near), ids_of(30)
    tree, _ = hand.draft(hand.row(ids))
    hand.drafter._layers.kv.fill_(float("nan"))
    others = hand.pages[::-1]
    assert hand.draft(hand.row(ids, epoch=1, pages=others)) == (tree, 30)
    with_nan = hand.draft(hand.row(ids, epoch=2))  # its pages are marked as filled, and hold NaN by our doing
    assert with_nan == (DraftTree(), 2)


def test_sequences_that_share_pages_fill_them_once(
    target: Decoder, near: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_rows, "FILL_ROWS", 16)
    ids = ids_of(26)
    hand = Hand(target, near)
    expected = hand.draft(hand.row(ids))[0]  # nothing yet: 16 of 26 rows
    assert expected == DraftTree()
    expected = hand.draft(hand.row(ids))[0]
    hand = Hand(target, near)
    shared, free = hand.pages[:6], hand.pages[6:]
    rows = [hand.row(ids, f"n{i}", pages=[*shared, *free[4 * i : 4 * i + 4]]) for i in range(3)]
    calls = [hand.drafter.propose(rows, [9, 9, 9]) for _ in range(2)]
    assert calls == [[DraftTree()] * 3, [expected] * 3]
    filled = [batch for batch in hand.drafter.batches if batch.attention.tail_slots.shape[1] == 0]
    assert [len(batch.ids) for batch in filled] == [16, 14]  # 24 shared, two of each one's own
    assert all(len(set(batch.slots.tolist())) == len(batch.slots) for batch in filled)


def test_what_failed_is_not_taken_for_filled(target: Decoder, near: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    hand, ids = Hand(target, near), ids_of(30)
    expected = Hand(target, near).draft(hand.row(ids))[0]
    hand.draft(hand.row(ids[:20]))
    forward = near.forward
    with monkeypatch.context() as patch:
        patch.setattr(near, "forward", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hand.draft(hand.row(ids))
    assert near.forward == forward
    assert hand.draft(hand.row(ids)) == (expected, 10)


def test_sequences_without_scratch_wait(target: Decoder, near: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_rows, "SCRATCH_SLOTS", 14)
    hand = Hand(target, near)
    rows = [hand.row(ids_of(8 + i, i), f"s{i}", pages=hand.pages[8 * i : 8 * i + 8]) for i in range(3)]
    trees = hand.drafter.propose(rows, [5, 7, 5])
    alone = [Hand(target, near).draft(row, cap)[0] for row, cap in zip(rows, [5, 7, 5], strict=True)]
    assert trees == [alone[0], alone[1], DraftTree()]


def test_a_window_reads_the_last_tokens(target: Decoder, near: Decoder) -> None:
    ids = ids_of(41)
    hand = Hand(target, near, window=10)
    tree, num_rows = hand.draft(hand.row(ids))
    assert num_rows == 41 - 28  # 40 - 10, and down to the first slot of a page
    assert tree == Hand(target, near).draft(hand.row(ids[28:]))[0]
    # it stayed back by more than a window
    longer = ids + ids_of(30, seed=1)
    tree, num_rows = hand.draft(hand.row(longer, prompt_len=40))
    assert num_rows == 71 - 60
    assert tree == Hand(target, near).draft(hand.row(longer[60:]))[0]


# ---- shorter contexts, other vocabularies


@pytest.fixture(scope="module")
def short_folder(near_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The near model with a context of 64 tokens."""
    folder = tmp_path_factory.mktemp("short") / "llama"
    shutil.copytree(near_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    return folder


def test_a_shorter_context_is_survived(target_folder: Path, target: Decoder, short_folder: Path) -> None:
    short = load_decoder(short_folder, target.ops)
    harness, drafter = engine_with(target_folder, short_folder, TREE, {"num_draft_tokens": 6}, Watched)
    assert isinstance(drafter, Watched)
    item = request("long", "sampled", prompt(3, 90), max_tokens=150)
    run = harness.run([item])
    assert run.answers == EngineHarness(target_folder).run([item]).answers
    assert totals(harness, run)[1] > 5
    assert max(int(batch.positions.max()) for batch in drafter.batches) <= 63
    lengths = sorted(len(ids) for ids, *_ in drafter.seen if len(drafter.seen[ids, *_]))
    assert lengths[0] == 91 and lengths[-1] > 230
    # it reads the last half of what it can
    hand, ids = Hand(target, short), ids_of(120)
    tree, num_rows = hand.draft(hand.row(ids))
    assert num_rows == 120 - 84 and tree == Hand(target, short).draft(hand.row(ids[84:]))[0]
    tree, num_rows = hand.draft(hand.row(ids + ids_of(27, 1), prompt_len=119))
    assert num_rows == 27
    longer = ids + ids_of(28, 1)  # 84 + 64
    tree, num_rows = hand.draft(hand.row(longer, prompt_len=119))
    assert num_rows == 148 - 116 and tree == Hand(target, short).draft(hand.row(longer[116:]))[0]


def test_a_context_of_a_page_or_two_is_refused(target: Decoder, short_folder: Path) -> None:
    forward = CpuRunner(target, target.ops, 8, 32)
    with pytest.raises(ConfigError, match="context is 64 tokens; pages of 32 need at least 128"):
        load_draft_model(str(short_folder), forward, WINDOW)


def rename_token(folder: Path, target: Path, token_id: int, name: str) -> Path:
    shutil.copytree(folder, target)
    raw = json.loads((target / "tokenizer.json").read_text())
    [old] = [token for token, known in raw["model"]["vocab"].items() if known == token_id]
    raw["model"]["vocab"][name] = raw["model"]["vocab"].pop(old)
    (target / "tokenizer.json").write_text(json.dumps(raw))
    return target


def test_other_tokens_are_refused(target_folder: Path, near_folder: Path, target: Decoder, tmp_path: Path) -> None:
    forward = CpuRunner(target, target.ops, 8, PAGE, target_folder)
    wrong = rename_token(near_folder, tmp_path / "wrong", 254, "æøå")
    ours = token_strings(target_folder)[254]
    with pytest.raises(ConfigError, match=f"id 254 is {ours!r} in the target and 'æøå' in the draft model"):
        load_draft_model(str(wrong), forward, WINDOW)
    (wrong / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        load_draft_model(str(wrong), forward, WINDOW)
    with pytest.raises(ModelNotFound):
        load_draft_model(str(tmp_path / "nothing"), forward, WINDOW)


def test_ids_that_one_side_lacks() -> None:
    tokens = ["a", "b", "c", None, "e"]
    assert num_shared_ids(tokens, tokens[:3]) == 3
    assert num_shared_ids(tokens[:2], tokens) == 2
    assert num_shared_ids(tokens, list(tokens)) == 5
    with pytest.raises(ConfigError, match="id 3 is None in the target and 'd' in the draft model"):
        num_shared_ids(tokens, ["a", "b", "c", "d", "e"])


@pytest.mark.parametrize("extra", [40, -20])
def test_padded_vocabularies(
    target_folder: Path, near_folder: Path, target: Decoder, tmp_path: Path, extra: int
) -> None:
    """A draft model with more rows than tokens never proposes the others; one with fewer reads strangers as id 0."""
    folder = tmp_path / "padded"
    shutil.copytree(near_folder, folder)
    weights = load_file(folder / "model.safetensors")
    vocab_size = target.config.vocab_size + extra
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padding = torch.full((max(extra, 0), 64), 5.0)
        weights[name] = torch.cat((weights[name], padding))[:vocab_size].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    harness = EngineHarness(target_folder, "ngram", num_draft_tokens=6)
    forward: Any = harness.engine._runner
    drafter = load_draft_model(str(folder), forward, WINDOW)
    harness.engine.drafting.drafters["ngram"] = drafter
    items = [request(f"r{i}", "sampled", tuple(ids_of(20, i)), seed=i) for i in range(3)]
    items.append(request("strange", "greedy", (*ids_of(8), target.config.vocab_size - 1, 9)))
    run = harness.run(items)
    assert run.answers == EngineHarness(target_folder).run(items).answers
    assert totals(harness, run)[1] > 10
    [tree] = drafter.propose([Hand(target, target).row(ids_of(9))], [9])
    assert max(tree.token_ids) < min(vocab_size, target.config.vocab_size)


def test_by_name(target_folder: Path, near_folder: Path, target: Decoder) -> None:
    item = request("named", "sampled", prompt(2, 20))
    harness = EngineHarness(target_folder, "draft_model", draft_model=str(target_folder), num_draft_tokens=1)
    run = harness.run([item])
    drafted, accepted = totals(harness, run)
    assert accepted == drafted > 10
    assert run.finished["named/0"].speculation.drafter == "draft_model"
    assert run.answers == EngineHarness(target_folder).run([item]).answers
    forward = CpuRunner(target, target.ops, 8, PAGE, target_folder)
    with pytest.raises(ValueError, match="draft_model"):
        make_drafter("draft_model", SpeculationConfig(), forward)
    with pytest.raises(ValueError, match="draft_model"):
        make_drafter("draft_model", SpeculationConfig(draft_model=str(near_folder)), None)


def test_its_layers_are_counted_in_the_pool(target: Decoder, near_folder: Path) -> None:
    options: dict[str, Any] = {"kv_cache_gib": 0.01, "page_size": PAGE, "max_model_len": 64, "drafter": "off"}
    alone = resolve(EngineConfig.from_options(**options), target.config, 4)
    both = resolve(EngineConfig.from_options(**options, draft_model=str(near_folder)), target.config, 4)
    assert alone.cache.num_pages is not None
    assert both.cache.num_pages == alone.cache.num_pages // 2
