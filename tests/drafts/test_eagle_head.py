"""The head's forward against dense fp64 attention written down once more, for every option and layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import specserve_kernels
import torch
from eagle_files import Tensors, head_config, head_tensors, nested, write_head
from eagle_reference import Reference
from specserve_drafts.eagle_checkpoint import load_checkpoint
from specserve_drafts.eagle_head import EagleHead
from specserve_kernels import AttentionRows
from tiny import TinyLlama
from torch import Tensor

from specserve.models.decoder import Decoder
from specserve.models.weights import load_decoder

PAGE_SIZE, NUM_PAGES = 4, 12
NUM_COMMITTED = 9
PARENTS = (-1, -1, 0, 1, 1, 2)  # of nodes under the last committed row


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> Decoder:
    ops = specserve_kernels.load(os.environ.get("SPECSERVE_TEST_KERNELS", "auto"))
    return load_decoder(tiny_llama(layers=8, tied=False), ops)


def sizes(target: Decoder) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return {name: getattr(target.config, name) for name in names}


def paths() -> list[list[int]]:
    """Nodes from below the root to each node, itself last."""
    found: list[list[int]] = []
    for node, parent in enumerate(PARENTS):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found


def visibility() -> Tensor:
    total = NUM_COMMITTED + len(PARENTS)
    visible = torch.zeros(total, total, dtype=torch.bool)
    visible[:NUM_COMMITTED, :NUM_COMMITTED] = torch.ones(NUM_COMMITTED, NUM_COMMITTED).tril().bool()
    for node, path in enumerate(paths()):
        visible[NUM_COMMITTED + node, :NUM_COMMITTED] = True
        visible[NUM_COMMITTED + node, [NUM_COMMITTED + ancestor for ancestor in path]] = True
    return visible


def positions() -> Tensor:
    return torch.tensor([*range(1, NUM_COMMITTED + 1), *(NUM_COMMITTED + len(path) for path in paths())])


def expected(reference: Reference, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Committed rows read features; each level of nodes reads what its parents put out."""
    total = len(ids)
    hidden = torch.cat(
        (reference.fuse(features), torch.zeros(total - NUM_COMMITTED, reference.embed.shape[1]).double())
    )
    for _ in range(max(map(len, paths()))):
        fed_back, _ = reference.run(ids, hidden, positions(), visibility())
        for node, parent in enumerate(PARENTS):
            hidden[NUM_COMMITTED + node] = fed_back[NUM_COMMITTED + parent]
    return reference.run(ids, hidden, positions(), visibility())


class PagedHead:
    """One sequence of a head over shuffled pages; row i is in slot i, node j in slot NUM_COMMITTED + j."""

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self.kv = torch.full(head.kv_shape(NUM_PAGES, PAGE_SIZE), float("nan"), dtype=head.dtype)
        self.table = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(3)).to(torch.int32)[None]

    def run(self, rows: list[int], ids: Tensor, hidden: Tensor) -> Tensor:
        """`rows` of the sequence; `ids` and `hidden` are theirs."""
        tails = [
            [NUM_COMMITTED + n for n in paths()[row - NUM_COMMITTED]] if row >= NUM_COMMITTED else [] for row in rows
        ]
        depth = max(map(len, tails))
        index = torch.tensor(rows)
        attention = AttentionRows(
            sequence=torch.zeros(len(rows), dtype=torch.int32),
            prefix_len=(index + 1).clamp(max=NUM_COMMITTED).to(torch.int32),
            tail_slots=torch.tensor([t + [0] * (depth - len(t)) for t in tails], dtype=torch.int32).view(
                len(rows), depth
            ),
            tail_len=torch.tensor([len(tail) for tail in tails], dtype=torch.int32),
            page_table=self.table,
        )
        slots = self.table[0, index // PAGE_SIZE].long() * PAGE_SIZE + index % PAGE_SIZE
        return self.head.forward(ids, hidden, positions()[index], slots, attention, self.kv)

    def run_all(self, ids: Tensor, features: Tensor, chunk: int = NUM_COMMITTED) -> Tensor:
        """Committed rows in chunks, then nodes level by level; what came out of all of them."""
        fused = self.head.fuse(features)
        parts = []
        for start in range(0, NUM_COMMITTED, chunk):
            rows = list(range(start, min(start + chunk, NUM_COMMITTED)))
            parts.append(self.run(rows, ids[rows], fused[rows]))
        outputs = torch.cat([*parts, fused.new_zeros(len(PARENTS), parts[0].shape[1])])
        for depth in range(1, max(map(len, paths())) + 1):
            nodes = [node for node, path in enumerate(paths()) if len(path) == depth]
            rows = [NUM_COMMITTED + node for node in nodes]
            parents = [NUM_COMMITTED + PARENTS[node] for node in nodes]
            outputs[rows] = self.run(rows, ids[rows], self.head.feedback(outputs[parents]))
        return outputs


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True, "rope_theta": 300.0},
    "narrow": {"hidden_size": 16, "target_hidden_size": 32, "fc_norm": True, "own_embedding": True},
    "deep_qwen3": {"num_hidden_layers": 3, "qk_norm": True, "norm_before_residual": True},
    "eagle1": {"eagle1": True},
    "eagle1_bias": {"eagle1": True, "bias": True},
    "no_auxiliary": {"eagle_config": {"use_aux_hidden_state": False}},
}
NUMBERS = ("own_embedding", "qk_norm", "eagle1", "bias")


def build(target: Decoder, folder: Path, case: dict[str, Any]) -> tuple[dict[str, Any], Tensors, EagleHead]:
    config = head_config(sizes(target), **{name: value for name, value in case.items() if name not in NUMBERS})
    if case.get("eagle1"):
        config["draft_vocab_size"] = config["vocab_size"]
    numbers = {name: value for name, value in case.items() if name in NUMBERS}
    tensors = head_tensors(config, own_head=not case.get("eagle1"), **numbers)
    if "eagle_config" in case:
        del tensors["fc.weight"]
    if case.get("eagle1"):
        del config["draft_vocab_size"]
    written = nested(config, model_type="qwen3") if case.get("qk_norm") else config
    write_head(folder, written, tensors, "speculators" if case.get("qk_norm") else "official")
    return config, tensors, EagleHead(load_checkpoint(folder, target.config), target)


def inputs(head: EagleHead, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = head.config.num_features * head.config.target_hidden_size
    ids = torch.randint(head.config.body.vocab_size, (NUM_COMMITTED + len(PARENTS),), generator=generator)
    return ids, 2 * torch.randn(NUM_COMMITTED, width, generator=generator)


@pytest.mark.parametrize("name", CASES)
def test_forward_is_the_definition(target: Decoder, tmp_path: Path, name: str) -> None:
    config, tensors, head = build(target, tmp_path, CASES[name])
    ids, features = inputs(head)
    found = PagedHead(head).run_all(ids, features)
    fed_back, normed = expected(Reference(config, tensors, target.weights.embed.raw), ids, features)
    torch.testing.assert_close(head.feedback(found).double(), fed_back, atol=2e-4, rtol=1e-4)
    head_rows = tensors.get("lm_head.weight", target.weights.head.raw).double()
    torch.testing.assert_close(head.logits(found).double(), normed @ head_rows.T, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("layout", ["bin", "prefixed", "speculators"])
def test_layouts_give_the_same_bits(target: Decoder, tmp_path: Path, layout: str) -> None:
    config = head_config(sizes(target), norm_before_residual=True)
    tensors = head_tensors(config)
    logits = []
    for folder, kind in ((tmp_path / "official", "official"), (tmp_path / layout, layout)):
        write_head(folder, nested(config) if kind == "speculators" else config, tensors, kind)
        head = EagleHead(load_checkpoint(folder, target.config), target)
        logits.append(head.logits(PagedHead(head).run_all(*inputs(head))))
    assert torch.equal(*logits)
    assert logits[0].std() > 0.1


@pytest.mark.parametrize("chunk", [1, 4])
def test_chunks_and_levels_give_the_same_bits(target: Decoder, tmp_path: Path, chunk: int) -> None:
    _, _, head = build(target, tmp_path, {"num_hidden_layers": 2, "qk_norm": True})
    whole, chunked = (PagedHead(head).run_all(*inputs(head), chunk=size) for size in (NUM_COMMITTED, chunk))
    assert torch.equal(whole, chunked)


def test_a_head_without_its_own_matrices_shares_the_targets(target: Decoder, tmp_path: Path) -> None:
    config = head_config(sizes(target))
    tensors = head_tensors(config, own_head=False)
    head = EagleHead(load_checkpoint(write_head(tmp_path, config, tensors), target.config), target)
    assert head.target_ids is not None
    outputs = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    normed = target.ops.rms_norm(outputs, tensors["norm.weight"], 1e-5)
    torch.testing.assert_close(head.logits(outputs), target.logits(normed)[:, head.target_ids])
    shown = tensors | {"lm_head.weight": target.weights.head.raw[head.target_ids].clone()}
    shown["embed_tokens.weight"] = target.weights.embed.raw.clone()
    again = EagleHead(load_checkpoint(write_head(tmp_path / "shown", config, shown), target.config), target)
    ids, features = inputs(head)
    assert torch.equal(PagedHead(head).run_all(ids, features), PagedHead(again).run_all(ids, features))
    assert torch.equal(head.logits(outputs), again.logits(outputs))


def test_a_head_on_an_int8_target(target: Decoder, tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """Shared rows keep the very integers of the target's head; its embedding is read through its scales."""
    quantized = load_decoder(tiny_llama(layers=8, tied=False), target.ops, quantization="int8")
    config = head_config(sizes(target))
    tensors = head_tensors(config, own_head=False)
    write_head(tmp_path, config, tensors)
    head = EagleHead(load_checkpoint(tmp_path, quantized.config), quantized, "int8")
    assert head.target_ids is not None
    outputs = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    normed = target.ops.rms_norm(outputs, tensors["norm.weight"], 1e-5)
    assert torch.equal(head.logits(outputs), quantized.logits(normed)[:, head.target_ids])
    plain = EagleHead(load_checkpoint(tmp_path, target.config), target)
    ids, features = inputs(head)
    exact, found = (PagedHead(h).run_all(ids, features) for h in (plain, head))
    assert not torch.equal(exact, found)
    assert torch.nn.functional.cosine_similarity(exact, found).min() > 0.99
