"""Training of an EAGLE-3 head, whole and in parts, on a tiny random model."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from specserve_drafts.successors import pair_of, read_successors
from specserve_drafts.train.answers import (
    Answer,
    AnswerConfig,
    balanced_mix,
    generate_answers,
    read_answers,
    read_training_prompts,
)
from specserve_drafts.train.dataset import DraftVocabulary, load_pack, plan_packs
from specserve_drafts.train.evaluate import walk
from specserve_drafts.train.export import NAMES, load_tensors
from specserve_drafts.train.features import FeatureConfig, auxiliary_layers
from specserve_drafts.train.head import DraftHead, HeadConfig, attend
from specserve_drafts.train.loop import TrainConfig, pack_loss, scaled, train
from specserve_drafts.train.loss import SoftCrossEntropy, soft_targets
from specserve_drafts.train.pipeline import PipelineConfig, Prepared, make_features, new_head, prepare, run
from specserve_drafts.train.successors import RANK_WEIGHTS, count_successors, vote
from tiny import write_tiny_llama

from specserve.errors import ConfigError
from specserve.llm import LLM

NUM_PROMPTS = 24


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    folder = tmp_path_factory.mktemp("train")
    model = write_tiny_llama(folder / "model", layers=8)
    prompts = folder / "prompts.jsonl"
    lines = [{"prompt": f"Hello world {i} and the others", "source": "ab"[i % 2]} for i in range(NUM_PROMPTS)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return PipelineConfig(
        model=str(model),
        prompts=(prompts,),
        draft_vocab_size=64,
        answers=AnswerConfig(max_tokens=12, shard_size=10),
        features=FeatureConfig(prompt_window=16, max_rows=200),
        training=TrainConfig(epochs=6, pack_queries=64, learning_rate=3e-3, warmup_steps=3, num_steps=3),
    )


@pytest.fixture(scope="module")
def out(config: PipelineConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    run(config, folder)
    return folder


@pytest.fixture(scope="module")
def prepared(config: PipelineConfig, out: Path) -> Prepared:
    return prepare(config, out, make_features(config, out))


def test_loss_falls_over_a_run(config: PipelineConfig, prepared: Prepared, tmp_path: Path) -> None:
    head = new_head(config, prepared)
    packs = plan_packs(prepared.train, 64, 6, seed=0)
    losses = train(head, prepared.shards, packs, prepared.frozen, config.training, tmp_path)
    assert len(losses) == len(packs)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(
    config: PipelineConfig, prepared: Prepared, tmp_path: Path
) -> None:
    packs = plan_packs(prepared.train, 64, 3, seed=1)
    whole, first, second = (new_head(config, prepared) for _ in range(3))
    train(whole, prepared.shards, packs, prepared.frozen, config.training, tmp_path / "a")
    train(first, prepared.shards, packs, prepared.frozen, config.training, tmp_path / "b", stop_after=5)
    (tmp_path / "b" / "unfinished").mkdir()  # what a kill amid a checkpoint leaves
    train(second, prepared.shards, packs, prepared.frozen, config.training, tmp_path / "b")
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)), name
    assert not torch.equal(whole.fc.weight, first.fc.weight)


def test_export_has_the_public_tensors(config: PipelineConfig, out: Path, prepared: Prepared) -> None:
    tensors = load_file(out / "head" / "model.safetensors")
    written = json.loads((out / "head" / "config.json").read_text())
    assert set(tensors) == {f"{name}.weight" for name in NAMES.values()} | {"d2t", "t2d"}
    assert tensors["fc.weight"].shape == (32, 96)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (16, 64)
    ids = tensors["d2t"] + torch.arange(64)
    assert (ids.diff() > 0).all()
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["draft_vocab_size"] == 64
    assert written["rope_theta"] == 10000.0
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    about = json.loads((out / "head" / "provenance.json").read_text())
    assert about["prompts"][0]["sha256"] and len(about["target_fingerprint"]) == 64
    head = new_head(config, prepared)
    load_tensors(head, tensors, prepared.frozen.scales)
    pack = scaled(
        load_pack(prepared.shards, prepared.train[:3], prepared.frozen.vocabulary_mask, 3), prepared.frozen.scales
    )
    assert all(rows.isfinite().all() for rows in head(pack, prepared.frozen.embed, 3))


def test_the_table_of_a_run_holds_what_the_answers_rows_voted_for(out: Path, prepared: Prepared) -> None:
    vocab_size = prepared.target.config.vocab_size
    table = read_successors(out / "head" / "successors.safetensors", vocab_size)
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    seen: Counter[int] = Counter()
    for entry in prepared.shards.entries:
        best = (prepared.shards.hidden(entry).double() @ prepared.target.lm_head.double().T).topk(8).indices.tolist()
        ids = prepared.shards.ids(entry)[-entry.answer_len - 1 :].tolist()
        for previous, token_id, row in zip(ids, ids[1:], best, strict=False):
            for context in (token_id, pair_of(previous, token_id)):
                seen[context] += 1
                for weight, voted in zip(RANK_WEIGHTS, row, strict=True):
                    votes[context][voted] += weight
    is_pair = {context: context >= vocab_size for context in votes}
    known = {context: table.after_pair(context) if is_pair[context] else table.after(context) for context in votes}
    assert all(bool(found) == (not is_pair[context] or seen[context] > 1) for context, found in known.items())
    assert any(found for context, found in known.items() if is_pair[context])
    for context, found in known.items():
        if found:
            scores = [round(score, 6) for _, score in votes[context].most_common(8)]
            assert [round(votes[context][voted], 6) for voted in found] == scores


def test_votes_count_by_rank_and_ties_go_to_the_lowest_id() -> None:
    best = torch.tensor([[5, 3], [3, 5], [4, 2]])
    contexts, table, seen = vote(torch.tensor([7, 7, 1]), best, vocab_size=10)
    assert (contexts.tolist(), seen.tolist()) == ([1, 7], [1, 2])
    assert table[:, :3].tolist() == [[4, 2, -1], [3, 5, -1]]


def test_public_export_writes_the_output_head(config: PipelineConfig, out: Path, prepared: Prepared) -> None:
    run(replace(config, public=True), out)
    tensors = load_file(out / "head" / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(64)
    assert torch.equal(tensors["lm_head.weight"], prepared.target.lm_head[ids].bfloat16())


def test_answers_do_not_depend_on_order_or_a_restart(config: PipelineConfig, tmp_path: Path) -> None:
    mix = balanced_mix(read_training_prompts(config.prompts[0]), seed=0)
    assert {prompt.source for prompt in mix[:2]} == {"a", "b"}
    llm = LLM(config.model, "off", max_num_seqs=4)
    generate_answers(llm, mix, tmp_path / "a", config.answers)
    generate_answers(llm, mix[:10], tmp_path / "b", config.answers)
    generate_answers(llm, mix, tmp_path / "b", config.answers)
    answers = list(read_answers(tmp_path / "a"))
    assert answers == list(read_answers(tmp_path / "b"))
    assert [answer.greedy for answer in answers[:4]] == [True, False, True, False]
    with pytest.raises(ConfigError, match="config"):
        generate_answers(llm, mix, tmp_path / "a", replace(config.answers, seed=9))


def test_attention_is_that_of_the_dense_definition() -> None:
    torch.manual_seed(0)
    rows, count, steps, heads, kv_heads, dim = 9, 5, 3, 4, 2, 8
    q = torch.randn(count, heads, dim)
    keys, values = torch.randn(2, rows, kv_heads, dim)
    own = torch.randn(2, count, kv_heads, steps, dim)
    positions = torch.arange(rows - count, rows)
    hidden_from = torch.arange(rows)[None] > positions[:, None]
    found = attend(q, keys, values, hidden_from, (own[0], own[1]))
    all_keys = torch.cat((keys, *own[0].unbind(2))).repeat_interleave(heads // kv_heads, 1)
    all_values = torch.cat((values, *own[1].unbind(2))).repeat_interleave(heads // kv_heads, 1)
    visible = torch.cat((~hidden_from, *[torch.eye(count, dtype=torch.bool)] * steps), dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, all_keys) * dim**-0.5
    probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    torch.testing.assert_close(found, torch.einsum("hqk,khd->qhd", probs, all_values))


def test_head_loss_and_its_gradient_are_those_of_soft_cross_entropy() -> None:
    torch.manual_seed(0)
    x, hidden, weights = torch.randn(300, 16), torch.randn(300, 16), torch.rand(300)
    head = torch.randn(40, 16)
    x.requires_grad_()
    loss = SoftCrossEntropy.apply(x, soft_targets(hidden, head), weights, head)
    (found,) = torch.autograd.grad(loss, x)
    q = (hidden @ head.T).softmax(-1)
    expected = (weights * -(q * (x @ head.T).log_softmax(-1)).sum(-1)).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, x)[0])


def test_training_time_test_is_a_chain_of_drafts(prepared: Prepared) -> None:
    """One row at a time, with its own keys appended, gives what the parallel test gives."""
    torch.manual_seed(0)
    target = prepared.target
    head = DraftHead(target.head_config(64), torch.float32)
    entry = prepared.train[0]
    pack = load_pack(prepared.shards, [entry], prepared.frozen.vocabulary_mask, 3)
    outputs = head(pack, prepared.frozen.embed, 3)
    length, answer = pack.lengths[0], prepared.shards.answer_ids(entry)
    for query in range(pack.num_queries[0]):
        rows = length - pack.num_queries[0] + query + 1  # what a drafter has seen with this answer token as root
        alone = replace(
            pack,
            features=pack.features[:rows],
            next_ids=pack.next_ids[:rows],
            lengths=(rows,),
            num_queries=(1,),
            query_ids=pack.query_ids[:, query : query + 1],
        )
        for step, found in enumerate(head(alone, prepared.frozen.embed, 3)):
            torch.testing.assert_close(found[0], outputs[step][query])
        assert pack.query_ids[0, query] == answer[query] == pack.next_ids[rows - 1]
        assert pack.guessed_ids[0, query] == answer[query + 1]


def test_same_seed_same_start_and_loss(config: PipelineConfig, prepared: Prepared) -> None:
    def first_loss(seed: int) -> float:
        other = replace(config, training=replace(config.training, seed=seed))
        packs = plan_packs(prepared.train, 64, 1, seed)
        pack = load_pack(prepared.shards, packs[0], prepared.frozen.vocabulary_mask, 3)
        return pack_loss(new_head(other, prepared), scaled(pack, prepared.frozen.scales), prepared.frozen, 3).item()

    assert first_loss(1) == first_loss(1)
    assert first_loss(1) != first_loss(2)


def test_draft_vocabulary_is_the_most_frequent_ids_ascending() -> None:
    answers = [torch.tensor([5, 5, 2, 9]), torch.tensor([9, 7])]
    assert DraftVocabulary.of_answers(answers, 10, 3).ids.tolist() == [2, 5, 9]
    assert DraftVocabulary.of_answers(answers, 10, 6).ids.tolist() == [0, 1, 2, 5, 7, 9]


def test_walk_counts_the_steps_of_a_run() -> None:
    assert walk([0, 0, 0]) == (3, 3)
    assert walk([2, 1, 0, 1, 0]) == (2, 5)


def test_successors_are_the_most_frequent_ones() -> None:
    answers = [Answer("a", True, (1, 2), (3, 1, 2)), Answer("a", True, (1, 4), (1, 4))]
    table = count_successors(answers, 6)
    assert table[1].tolist() == [2, 4, -1, -1, -1, -1, -1, -1]
    assert table[3, 0] == 1
    assert (table[5] == -1).all()


def test_a_target_with_few_layers_is_refused() -> None:
    assert auxiliary_layers(30) == (2, 15, 27)
    with pytest.raises(ConfigError, match="at least 7"):
        auxiliary_layers(6)


def test_config_of_a_head_follows_the_target(prepared: Prepared) -> None:
    assert prepared.target.head_config(10**6) == HeadConfig(
        hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8,
        draft_vocab_size=prepared.target.config.vocab_size, rms_norm_eps=1e-5,
    )  # fmt: skip
