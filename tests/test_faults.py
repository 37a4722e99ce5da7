"""Faults reported against speculation in other engines; the right behaviour of each, as a test.

By number of the reports (M = tests/exactness/test_matrix.py, P = tests/exactness/test_parameters.py,
O = tests/exactness/test_oracle.py, D = tests/test_distribution.py; a bare name is a test below):

1, 2, 7, 8  text changes, M = 1 ≠ M = k + 1, greedy verify: M, P, D; the first difference is named: test_proof.py
4–6     draft probabilities that were not sampled from: test_block_law.py (the n-gram drafter has none)
9       sampler that returns the argmax: test_every_survivor_is_drawn
10–13   corrupt at batch > 2, late rollback, seeds that leak: M "mates", test_sim.py, test_seeds_are_ones_own
14      seed at T = 0: test_a_seed_matters_only_where_something_is_drawn
16, 17  EOS inside the run: test_eos_inside_a_run_ends_the_answer_there
18, 20–23  which end wins, and everything cut at it: test_the_earliest_end_wins_and_everything_is_cut_there
24      min_tokens counts positions: P "min_tokens", tests/core/test_commit.py
25      a drafted EOS that is rejected: test_a_rejected_eos_ends_nothing
26      end of the context: test_an_answer_ends_exactly_at_the_context
28      positions across powers of two: test_acceptance_survives_every_power_of_two
29–34   bias, min_p, penalties ignored, weakened or counted twice: P, with planted errors
37      n > 1: test_choices_cost_a_neighbour_nothing; M "n3"
38, 39  logprobs of drafts and of chunks: P, O, test_prompt_logprobs_do_not_depend_on_chunks
40–42   grammars: tests/grammar; preemption with drafts: M, P "preempted"
43–45, 67  tokens of one step told one by one: test_every_token_tells_whether_it_was_drafted, test_tokenizer.py
46, 47  pages that leak: test_all_pages_come_back; test_sim.py, tests/core/test_engine_machine.py
48      output of a preempted request: M, P "preempted", test_sim.py
49, 53  KV of drafts in the prefix index, hits that vanish: test_an_answer_written_by_drafts_is_a_prefix_hit
51      drafts of chunked prompts: test_chunks_do_not_change_drafts
56, 57, 59  budget, first token, hidden caps: test_drafts_stay_inside_the_token_budget,
        test_nobody_drafts_while_a_first_token_waits, test_speculation_caps_nobody
58      scan of the whole prompt: tests/core/test_policy.py::test_ngram_looks_at_new_tokens_only
60      silent inactivity: test_inactive_speculation_says_why
61      padded vocabulary: test_a_padded_vocabulary_is_served
63, 64  per-request control: test_a_request_sets_its_own_draft_length (load-aware: with the controller)
65      trees: every "random_tree" cell of M and P
68      exact statistics: test_statistics_count_what_was_verified

Not of today's product: 15 (CUDA graphs), 36 (custom processors), 50, 52, 55, 62 (drafters with weights or a
tokenizer of their own), 66 (LoRA), 69 (pipeline parallelism).
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import OracleAnswers, compare_logprobs, prompt, request
from drafters import AlwaysWrongDrafter, CountingDrafter, OracleDrafter, RandomTreeDrafter
from harness import EOS_IDS, EngineHarness, Run, sharpen
from safetensors.torch import load_file, save_file
from specserve_drafts.ngram import NgramDrafter
from specserve_kernels import load
from tiny import TinyLlama

from specserve.build import build
from specserve.config import EngineConfig
from specserve.events import FinishReason
from specserve.proposal import DraftRow, DraftTree
from specserve.request import Request, SamplingParams, SpeculationParams
from specserve.sample import Draw, draw_tokens

VOCAB = 300
LONG = 60


@pytest.fixture(scope="module")
def folder(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(tiny_llama(tied=False, hidden=64), tmp_path_factory.mktemp("faults") / "llama")


def free(folder: Path, item: Request, **options: Any) -> Run:
    """The request without drafts and without any end but its length."""
    params = replace(item.params, ignore_eos=True, stop=(), stop_token_ids=(), max_tokens=LONG, logprobs=0)
    return EngineHarness(folder, **options).run([replace(item, params=params)])


def past_the_end(run: Run, item: Request) -> OracleDrafter:
    """Drafts what would follow if nothing ended the answer."""
    return OracleDrafter(run.full([item]))


# ---- ends -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Landmark:
    """A token of a free answer whose id and whose text occur there for the first time."""

    index: int
    token_id: int
    text: str


def landmarks(run: Run, key: str) -> list[Landmark]:
    tokens, found = run.tokens[key], []
    whole = "".join(token.text for token in tokens)
    for i, token in enumerate(tokens):
        before = "".join(t.text for t in tokens[:i])
        fresh = token.token_id not in [t.token_id for t in tokens[:i]]
        if fresh and len(token.text) >= 1 and "\ufffd" not in token.text and whole.find(token.text) == len(before):
            found.append(Landmark(i, token.token_id, token.text))
    return found


@pytest.mark.parametrize("temperature", [0.0, 2.5])
def test_eos_inside_a_run_ends_the_answer_there(temperature: float, folder: Path) -> None:
    num_inside = 0
    for seed in range(12):
        item = request("r", "", prompt(seed, 20), seed=seed, temperature=temperature, ignore_eos=False, max_tokens=LONG)
        endless = free(folder, item)
        ids = endless.answers["r/0"]
        if not set(ids) & set(EOS_IDS):
            continue
        end = min(i for i, token_id in enumerate(ids) if token_id in EOS_IDS)
        run = EngineHarness(folder, past_the_end(endless, item), num_draft_tokens=7).run([item])
        assert run.answers["r/0"] == ids[: end + 1]
        assert (run.finished["r/0"].reason, run.finished["r/0"].stop_match) == (FinishReason.STOP, ids[end])
        # the step could have told seven drafts and a bonus
        num_inside += end > 0 and run.sizes["r/0"][-1] < 8
    assert num_inside >= (1 if temperature else 0)


ENDS = [*itertools.permutations(("id", "text", "length")), ("id", "length"), ("text", "length")]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("order", ENDS, ids="-".join)
def test_the_earliest_end_wins_and_everything_is_cut_there(order: Sequence[str], include: bool, folder: Path) -> None:
    """Ids, text, logprobs, usage and statistics end at one token, in a run of drafts that goes on behind it."""
    item = request("r", "", prompt(3, 20), temperature=1.5, seed=5)
    endless = free(folder, item)
    marks: list[Landmark] = []
    for mark in landmarks(endless, "r/0"):
        if mark.index >= (marks[-1].index + 3 if marks else 4):  # room for drafts behind each
            marks.append(mark)
    at = dict(zip(order, marks[: len(order)], strict=True))
    params = replace(
        item.params,
        stop_token_ids=(at["id"].token_id,) if "id" in at else (),
        stop=(at["text"].text,) if "text" in at else (),
        max_tokens=at["length"].index + 1,
        include_stop_str_in_output=include,
        logprobs=2,
    )
    asked = replace(item, params=params)
    run = EngineHarness(folder, past_the_end(endless, item), num_draft_tokens=16).run([asked])
    end, last = run.finished["r/0"], marks[0].index
    assert run.answers["r/0"] == endless.answers["r/0"][: last + 1]
    assert end.reason == (FinishReason.LENGTH if order[0] == "length" else FinishReason.STOP)
    assert end.stop_match == {"id": marks[0].token_id, "text": marks[0].text, "length": None}[order[0]]
    kept = last if order[0] == "text" and not include else last + 1
    assert run.texts["r/0"] == "".join(token.text for token in endless.tokens["r/0"][:kept])
    assert [t.logprobs.logprob for t in run.tokens["r/0"]] == [
        t.logprobs.logprob for t in endless.tokens["r/0"][: last + 1]
    ]
    assert end.usage.completion_tokens == last + 1
    stats = end.speculation
    assert stats.num_committed_tokens == last  # the first token came with the prompt
    assert stats.num_accepted_tokens == sum(token.drafted for token in run.tokens["r/0"])
    assert stats.acceptance_length == last / stats.num_steps
    if order[0] != "length":
        assert stats.num_draft_tokens > stats.num_accepted_tokens  # what was drafted behind the stop


class EosDrafter(CountingDrafter):
    """Is sure that the answer ends now."""

    def draft(self, row: DraftRow, cap: int) -> DraftTree:
        return DraftTree.chain(EOS_IDS[:cap], self.name)


def test_a_rejected_eos_ends_nothing(folder: Path) -> None:
    item = request("r", "greedy", prompt(1, 21), ignore_eos=False)
    off = EngineHarness(folder).run([item])
    assert not set(off.answers["r/0"]) & set(EOS_IDS)
    drafter = EosDrafter()
    on = EngineHarness(folder, drafter).run([item])
    assert on.answers == off.answers
    assert drafter.num_proposes == len(off.answers["r/0"]) - 2  # not for the first token, and no room at the last
    assert on.finished["r/0"].speculation.num_accepted_tokens == 0


@pytest.mark.parametrize("drafter_name", ["oracle", "ngram"])
def test_an_answer_ends_exactly_at_the_context(drafter_name: str, folder: Path) -> None:
    limit, options = 48, {"max_model_len": 48, "num_draft_tokens": 8}
    requests = [request(f"r{room}", "greedy", prompt(4, limit - room), max_tokens=None) for room in range(1, 14)]
    off = EngineHarness(folder, **options).run(requests)
    drafter = OracleDrafter(off.full(requests)) if drafter_name == "oracle" else drafter_name
    on = EngineHarness(folder, drafter, **options).run(requests)
    assert on.answers == off.answers
    for room in range(1, 14):
        assert len(on.answers[f"r{room}/0"]) == room
        assert on.finished[f"r{room}/0"].reason == FinishReason.LENGTH
    assert sum(end.speculation.num_accepted_tokens for end in on.finished.values()) > 0


def test_acceptance_survives_every_power_of_two(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """Every draft is right before, across and after the boundary, also at the end of a context of 4,096."""
    small = tiny_llama(layers=1, tied=False, heads=2, kv_heads=1, max_positions=4096)
    folder = sharpen(small, tmp_path / "long")
    options = {"num_pages": 300, "num_draft_tokens": 4, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
    lengths = [2**k - 9 for k in range(6, 12)] + [4096 - 18, 20]
    requests = [request(f"r{n}", "greedy", prompt(n, n), max_tokens=18) for n in lengths]
    arrivals = {item.request_id: 30 * i for i, item in enumerate(requests)}
    off = EngineHarness(folder, **options).run(requests, arrivals)
    for drafter in (OracleDrafter(off.full(requests)), "ngram"):
        on = EngineHarness(folder, drafter, **options).run(requests, arrivals)
        assert on.answers == off.answers
        if isinstance(drafter, OracleDrafter):
            # 1 from the prompt, then 4 drafts and a bonus a step, to the end
            assert all(sizes == [1, 5, 5, 5, 2] for sizes in on.sizes.values())


# ---- seeds and draws ------------------------------------------------------------------------------------------------


def test_seeds_are_ones_own(folder: Path) -> None:
    """Among unseeded ones a seeded request draws what it draws alone; the others' reported seeds repeat them."""
    seeded = [request(f"s{i}", "sampled", prompt(i, 18), seed=i) for i in range(3)]
    unseeded = [request(f"u{i}", "sampled", prompt(0, 18), seed=None) for i in range(3)]
    mixed = [item for pair in zip(seeded, unseeded, strict=True) for item in pair]
    together = EngineHarness(folder, "ngram").run(mixed, {"u1": 3, "s2": 5})
    seeds = {name: started.seed for name, started in together.started.items()}
    assert len({seeds[item.request_id] for item in unseeded}) == 3
    assert len({tuple(together.answers[f"{item.request_id}/0"]) for item in unseeded}) == 3
    for item in mixed:
        again = replace(item, params=replace(item.params, seed=seeds[item.request_id]))
        alone = EngineHarness(folder).run([again])
        assert alone.answers[f"{item.request_id}/0"] == together.answers[f"{item.request_id}/0"]


def test_a_seed_matters_only_where_something_is_drawn(folder: Path) -> None:
    for mode, num_answers in (("greedy", 1), ("sampled", 4)):
        requests = [request(f"r{seed}", mode, prompt(2, 20), seed=seed) for seed in range(4)]
        run = EngineHarness(folder, "ngram").run(requests)
        assert len({tuple(ids) for ids in run.answers.values()}) == num_answers


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, {0, 1, 2, 3, 4, 5}), ({"top_k": 3}, {1, 3, 4}), ({"min_p": 0.5}, {1, 4}), ({"top_p": 0.7}, {1, 3, 4})],
)
def test_every_survivor_is_drawn(settings: Mapping[str, Any], expected: set[int]) -> None:
    logits = torch.log(torch.tensor([[0.1, 0.3, 0.08, 0.14, 0.3, 0.08]]))
    params = SamplingParams(**settings)
    draws = [Draw(row=0, draw_index=7, choice=0, seed=seed, params=params) for seed in range(300)]
    assert set(draw_tokens(logits, draws, load("auto"))) == expected


# ---- choices, logprobs, tokens --------------------------------------------------------------------------------------


def test_choices_cost_a_neighbour_nothing(folder: Path) -> None:
    neighbour = request("a", "sampled", prompt(5, 20))
    many = request("b", "sampled", prompt(6, 20), n=4)
    alone = EngineHarness(folder, "ngram").run([neighbour])
    both = EngineHarness(folder, "ngram").run([neighbour, many])
    assert both.sizes["a/0"] == alone.sizes["a/0"] and both.answers["a/0"] == alone.answers["a/0"]
    assert both.finished["a/0"].speculation == alone.finished["a/0"].speculation
    stats = [both.finished[f"b/{choice}"].speculation for choice in range(4)]
    assert all(s.num_drafts >= 1 for s in stats)
    for choice, s in enumerate(stats):
        assert s.num_committed_tokens == len(both.answers[f"b/{choice}"]) - 1
        assert s.num_accepted_tokens == sum(token.drafted for token in both.tokens[f"b/{choice}"])


def test_prompt_logprobs_do_not_depend_on_chunks(folder: Path) -> None:
    """The same bits for chunks of 5, 16 and the whole, with somebody else drafting; and the oracle's values."""
    item = request("r", "greedy", prompt(7, 61), prompt_logprobs=4, logprobs=3, max_tokens=10)
    other = request("early", "greedy", prompt(8, 12), max_tokens=60)
    told = []
    for budget, chunk in ((7, 5), (20, 16), (512, 16)):
        options = {"max_num_batched_tokens": budget, "min_chunk": chunk, "max_num_seqs": 2, "dtype": "float32"}
        harness = EngineHarness(folder, "ngram", **options)
        run = harness.run([other, item], {"r": 4})
        told.append((run.started["r"].prompt_logprobs, [token.logprobs for token in run.tokens["r/0"]]))
        assert (harness.chunks["r/0"] > 1) == (budget < 512)
        expected = OracleAnswers(folder).of(item)
        assert run.answers["r/0"] == expected.token_ids
        compare_logprobs(run, item, 0, expected)
    assert told[0] == told[1] == told[2]


def test_every_token_tells_whether_it_was_drafted(folder: Path) -> None:
    """One event a step; in it the drafts come first, then the token that the target added."""
    item = request("r", "sampled", prompt(1, 21))
    run = EngineHarness(folder, "ngram").run([item])
    tokens = iter(run.tokens["r/0"])
    for size in run.sizes["r/0"]:
        flags = [next(tokens).drafted for _ in range(size)]
        assert all(flags[:-1])
    stats = run.finished["r/0"].speculation
    assert stats.num_accepted_tokens == sum(token.drafted for token in run.tokens["r/0"]) >= 1
    assert len(run.sizes["r/0"]) == 1 + stats.num_steps


def test_statistics_count_what_was_verified(folder: Path) -> None:
    """Trees of varying width: counts are of nodes that were there, not of a configured width."""

    item = request("r", "sampled", prompt(1, 21))
    off = EngineHarness(folder).run([item])
    harness = EngineHarness(folder, RandomTreeDrafter(1, VOCAB, off.full([item])), num_draft_tokens=9)
    verified: list[tuple[DraftTree, tuple[int, ...]]] = []
    accepted = harness.engine._accepted

    def watched(span: Any, *rest: Any) -> tuple[int, ...]:
        path = accepted(span, *rest)
        if span.sequence.has_token:
            verified.append((span.tree, path))
        return path

    harness.engine._accepted = watched  # type: ignore[method-assign]
    stats = harness.run([item]).finished["r/0"].speculation
    trees, lengths = [tree for tree, _ in verified], [len(path) for _, path in verified]
    assert len({len(tree) for tree in trees}) >= 3
    depths = [depth for tree in trees for depth in tree.depths()]
    assert stats.num_draft_tokens == len(depths)
    assert stats.drafted_per_position == [depths.count(1 + i) for i in range(max(depths))]
    assert stats.num_accepted_tokens == sum(lengths)
    assert stats.accepted_per_position == [sum(length > i for length in lengths) for i in range(max(depths))]
    assert stats.num_drafts == sum(len(tree) > 0 for tree in trees)
    assert stats == replace(harness.engine.metrics.speculation, drafter=stats.drafter)


# ---- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["finish", "abort", "deadline", "forward", "preempt"])
def test_all_pages_come_back(ending: str, folder: Path) -> None:
    """Slots of rejected drafts too: the pool is as it was, whatever ended the requests."""
    requests = [request(f"r{i}", "sampled", prompt(i, 13 + i), seed=i) for i in range(4)]
    off = EngineHarness(folder, enable_prefix_caching=False).run(requests)
    if ending == "deadline":
        requests = [replace(item, deadline=0.0) for item in requests]
    small = {"page_size": 4, "num_pages": 30 if ending == "preempt" else 100, "min_chunk": 4}
    drafter = RandomTreeDrafter(1, VOCAB, off.full(requests))
    harness = EngineHarness(folder, drafter, enable_prefix_caching=False, **small)
    engine = harness.engine
    if ending == "deadline":
        now = [-1.0]
        engine.clock = lambda: now[0]
    for item in requests:
        engine.submit(item)
    for _ in range(6):
        engine.step()
    assert ending == "preempt" or engine.pool.num_free < small["num_pages"]
    match ending:
        case "abort":
            for item in requests:
                engine.abort(item.request_id)
        case "deadline":
            now[0] = 1.0
        case "forward":
            forward = engine._runner.forward
            engine._runner.forward = lambda step: forward(None)  # type: ignore[method-assign,arg-type]
    steps = 0
    while engine.has_work():
        engine.step()
        steps += 1
    engine.pool.check()
    assert engine.pool.num_free == small["num_pages"]
    assert (steps > 5) == (ending in ("finish", "preempt"))
    assert (engine.metrics.num_preemptions > 0) == (ending == "preempt")
    assert drafter.num_proposes >= 1 and drafter.num_starts == drafter.num_stops


@pytest.mark.parametrize("drafter_name", ["always_wrong", "random_tree", "oracle", "ngram"])
def test_an_answer_written_by_drafts_is_a_prefix_hit(drafter_name: str, folder: Path) -> None:
    """Pages that drafts went through are found again, as many as without drafts, and hold what they should."""
    first = request("first", "sampled", prompt(9, 21), max_tokens=50)
    off = EngineHarness(folder).run([first])
    full = off.full([first])
    then = request("then", "sampled", (*full["first/0"], 7, 8), seed=3)
    uncached = EngineHarness(folder, enable_prefix_caching=False).run([then])
    plain = EngineHarness(folder).run([first, then], {"then": 60})
    drafters: dict[str, Any] = {
        "always_wrong": AlwaysWrongDrafter(full, VOCAB),
        "random_tree": RandomTreeDrafter(4, VOCAB, full),
        "oracle": OracleDrafter(full),
    }
    harness = EngineHarness(folder, drafters.get(drafter_name, drafter_name))
    on = harness.run([first, then], {"then": 60})
    assert on.finished["first/0"].speculation.num_draft_tokens > 0
    assert on.answers["then/0"] == plain.answers["then/0"] == uncached.answers["then/0"]
    page_size = harness.engine.limits.page_size
    assert plain.started["then"].cached_tokens >= 3 * page_size
    assert abs(on.started["then"].cached_tokens - plain.started["then"].cached_tokens) <= page_size


# ---- scheduling -----------------------------------------------------------------------------------------------------


class RecordingNgram(NgramDrafter):
    """Keeps what it proposed, by sequence and number of tokens, and what it knew when it was started."""

    def __init__(self) -> None:
        super().__init__()
        self.proposed: dict[tuple[str, int], DraftTree] = {}
        self.outputs_at_start: list[int] = []

    def start(self, view: DraftRow) -> None:
        super().start(view)
        self.outputs_at_start.append(len(view.token_ids) - view.prompt_len)

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        trees = super().propose(rows, caps)
        self.proposed |= {(row.sequence_id, len(row.token_ids)): tree for row, tree in zip(rows, trees, strict=True)}
        return trees


def test_chunks_do_not_change_drafts(folder: Path) -> None:
    item = request("r", "sampled", prompt(2, 70))
    drafts = []
    for budget in (20, 33, 512):
        drafter = RecordingNgram()
        harness = EngineHarness(folder, drafter, max_num_batched_tokens=budget, max_num_seqs=2)
        harness.run([item])
        assert (harness.chunks["r/0"] > 1) == (budget < 512)
        drafts.append(drafter.proposed)
    assert drafts[0] == drafts[1] == drafts[2]
    assert sum(map(len, drafts[0].values())) > 0


def test_drafts_stay_inside_the_token_budget(folder: Path) -> None:
    requests = [request(f"r{i}", "sampled", prompt(i, 20 + i), seed=i) for i in range(6)]
    off = EngineHarness(folder).run(requests)
    budget = 24
    drafter = RandomTreeDrafter(1, VOCAB, off.full(requests), num_nodes=64)
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 6, "num_draft_tokens": 64}
    harness = EngineHarness(folder, drafter, **options)
    assert harness.run(requests).answers == off.answers
    assert 6 < harness.engine.metrics.max_rows_in_step <= budget


def test_nobody_drafts_while_a_first_token_waits(folder: Path) -> None:
    drafter = RecordingNgram()
    harness = EngineHarness(folder, drafter, max_num_batched_tokens=20, max_num_seqs=4)
    engine = harness.engine
    early, late = request("early", "greedy", prompt(1, 12)), request("late", "greedy", prompt(2, 90))
    engine.submit(early)
    for _ in range(4):
        engine.step()
    assert drafter.proposed
    engine.submit(late)
    tokens_of_early = 0
    for _ in range(5):  # chunks of at most 19, beside early's root
        before = len(drafter.proposed)
        events = engine.step()
        tokens_of_early += sum(len(event.tokens) for event in events if getattr(event, "request_id", "") == "early")
        assert len(drafter.proposed) == before
    assert harness.chunks["late/0"] == 5 and tokens_of_early == 5
    while engine.has_work():
        engine.step()
    assert {key[0] for key in drafter.proposed} == {"early/0", "late/0"}
    assert drafter.outputs_at_start and min(drafter.outputs_at_start) >= 1


def test_speculation_caps_nobody(folder: Path) -> None:
    requests = [request(f"r{i}", "greedy", prompt(i, 5), max_tokens=20) for i in range(16)]
    seats = {}
    for drafter in ("off", "ngram"):
        harness = EngineHarness(folder, drafter, max_num_seqs=16, num_draft_tokens=64)
        harness.run(requests)
        seats[drafter] = harness.max_sequences
    assert seats == {"off": 16, "ngram": 16}


# ---- control --------------------------------------------------------------------------------------------------------


class SilentDrafter(CountingDrafter):
    def draft(self, row: DraftRow, cap: int) -> DraftTree:
        return DraftTree()


def test_inactive_speculation_says_why(folder: Path) -> None:
    item = request("r", "greedy", prompt(1, 12), max_tokens=6)
    reasons = {}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "off": ("off", {}),
        "zero": ("ngram", {"num_draft_tokens": 0}),
        "silent": (SilentDrafter(), {}),
    }
    for name, (drafter, options) in cases.items():
        run = EngineHarness(folder, drafter, **options).run([item])
        reasons[name] = run.finished["r/0"].speculation.inactive_reason
    assert reasons == {
        "off": "speculation is off",
        "zero": "num_draft_tokens is 0",
        "silent": "drafter 'ngram' proposed nothing",
    }
    for drafter, count, loud in (
        ("off", 5, "off"),
        ("ngram", 0, "off"),
        ("ngram", 5, "ngram, up to 5"),
        ("auto", 7, "auto (suffix, recycling, predictions; no EAGLE head for this model), up to 7"),
    ):
        options = {"model": str(folder), "num_pages": 32, "drafter": drafter, "num_draft_tokens": count}
        lines = build(EngineConfig.from_options(**options)).startup_lines
        assert any(line.startswith(f"speculation: {loud}") for line in lines)


def test_a_request_sets_its_own_draft_length(folder: Path) -> None:
    base = request("r", "greedy", prompt(1, 21))
    asked = {
        "off": SpeculationParams(drafter="off"),
        "zero": SpeculationParams(num_draft_tokens=0),
        "two": SpeculationParams(num_draft_tokens=2),
        "engine": SpeculationParams(),
        "nine": SpeculationParams(drafter="ngram", num_draft_tokens=9),
    }
    requests = [replace(base, request_id=name, speculation=params) for name, params in asked.items()]
    off = EngineHarness(folder).run(requests)
    run = EngineHarness(folder, "ngram", num_draft_tokens=4).run(requests)
    assert run.answers == off.answers
    longest = {name: len(run.finished[f"{name}/0"].speculation.drafted_per_position) for name in asked}
    assert longest == {"off": 0, "zero": 0, "two": 2, "engine": 4, "nine": 9}
    # an engine whose speculation is off still serves who asks for it
    wanted = EngineHarness(folder, "off").run([requests[-1]])
    assert wanted.answers["nine/0"] == off.answers["nine/0"]
    assert wanted.finished["nine/0"].speculation.num_drafts > 0


def test_a_padded_vocabulary_is_served(folder: Path, tmp_path: Path) -> None:
    """More rows in the model than tokens in the tokenizer: such ids are drawn, drafted and have no text."""
    padded = tmp_path / "padded"
    shutil.copytree(folder, padded)
    weights = load_file(padded / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], weights[name][50:66]])
    save_file(weights, padded / "model.safetensors", metadata={"format": "pt"})
    config = (padded / "config.json").read_text()
    vocab = len(weights["lm_head.weight"])
    (padded / "config.json").write_text(config.replace(f'"vocab_size": {vocab - 16}', f'"vocab_size": {vocab}'))
    bias = dict.fromkeys((vocab - 1, vocab - 2, 60), 12.0)
    item = request("r", "sampled", prompt(1, 21), logit_bias=bias)
    off = EngineHarness(padded).run([item])
    on = EngineHarness(padded, "ngram").run([item])
    assert on.answers == off.answers and on.texts == off.texts
    assert np.max(on.answers["r/0"]) >= vocab - 16
    assert on.finished["r/0"].speculation.num_accepted_tokens > 0
