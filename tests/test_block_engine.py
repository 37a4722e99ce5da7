"""Block verification in an engine: answers follow the target's law, whatever was drafted, and never at T = 0.

Target and drafter are tables of logits over four ids, behind the real engine, the real `TreeGrower` and the real block
rule. The joint law of three tokens is multiplied out and compared with a count of answers (chi-square, fixed seeds, so
a p-value is a constant of the code). Errors that such engines have, or nearly had here, are planted in the same run and
must be seen. Then the real drafters: what they hand out, and that nothing but the rule changes.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
import specserve_kernels
import torch
from cells import SITUATIONS, prompt, request
from eagle_files import head_config, head_tensors, write_head
from harness import EngineHarness, sharpen
from hashlm import HashRunner
from numpy.typing import NDArray
from specserve_drafts import grow
from specserve_drafts.grow import Level, Root, Shape, TreeGrower
from specserve_kernels import PURPOSE_ACCEPTANCE, PURPOSE_DRAFT, PURPOSE_TARGET, Ops
from test_distribution import chi_square
from torch import Tensor

from specserve import block
from specserve.batch import StepBatch
from specserve.block import SampledChain, StepKey, draft_purpose
from specserve.config import CacheConfig, EngineConfig, ModelLimits, SchedulerConfig, SpeculationConfig
from specserve.constraint import GrammarSpec
from specserve.controller import Controller
from specserve.drafting import verification_of
from specserve.engine import Engine
from specserve.errors import ConfigError, NumericFault
from specserve.events import Delta, Failed
from specserve.pages import PagePool, PageTable
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.request import Request, SamplingParams, SpeculationParams
from specserve.request import Sequence as Answer
from specserve.runner import ForwardResult
from specserve.sim.episode import PlainText

VOCAB, LENGTH, GAMMA, PAGE, NUM_PAGES = 4, 3, 3, 16, 2048
PROMPT = (0, 2, 1)
NUM_ANSWERS = 2400
THRESHOLD = 1e-5
Ids = tuple[int, ...]
Floats = NDArray[np.float32]
OPS = specserve_kernels.load("auto")
CHAIN = Shape(width=1, branch=1, depth=GAMMA)
DEEP = Shape()


# ---- an engine over tables ------------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """Logits after a prefix, fp32 [VOCAB]."""

    target: Callable[[Ids], Floats]
    draft: Callable[[Ids], Floats]


@cache
def random_logits(prefix: Ids, salt: int, spread: float) -> Floats:
    state = sum((token + 1) * salt**i for i, token in enumerate(reversed(prefix)))
    return np.random.default_rng(state).normal(0.0, spread, VOCAB).astype(np.float32)


def some_target(prefix: Ids) -> Floats:
    return random_logits(prefix, 31, 1.2)


def off_by(spread: float) -> Tables:
    return Tables(some_target, lambda prefix: some_target(prefix) + random_logits(prefix, 37, spread))


EVEN = (0.25, 0.25, 0.25, 0.25)


def trap(
    second: Sequence[Sequence[float]], after_zero: Sequence[Sequence[float]], after_others: Sequence[Sequence[float]]
) -> Tables:
    """(target's, drafter's) laws of the second token, and of the third after a 0 and after others; then all is even."""

    def logits(which: int, prefix: Ids) -> Floats:
        length = len(prefix) - len(PROMPT)
        third = after_others if prefix[-1] else after_zero
        laws = second if length == 1 else third if length == 2 else (EVEN, EVEN)
        return np.log(np.array(laws[which], np.float32))

    return Tables(partial(logits, 0), partial(logits, 1))


# Drafts of 0 are dropped oftener than not. Whether depends, in this order: on the second draft; on the last coin; and
# what replaces a second draft depends much on how much of the first one was owed.
SECOND = (0.45, 0.19, 0.18, 0.18), (0.85, 0.05, 0.05, 0.05)
DRAFT_TRAP = trap((EVEN, SECOND[1]), ((0.01, 0.97, 0.01, 0.01), EVEN), (EVEN, EVEN))
COIN_TRAP = trap(SECOND, (EVEN, EVEN), (EVEN, (0.55, 0.15, 0.15, 0.15)))
RESIDUAL_TRAP = trap(SECOND, ((0.4, 0.3, 0.29, 0.01), (0.01, 0.16, 0.16, 0.67)), (EVEN, EVEN))


class TableRunner(HashRunner):
    """Reads each row's prefix back through the pages and looks its logits up."""

    def __init__(self, target: Callable[[Ids], Floats]) -> None:
        super().__init__(NUM_PAGES, PAGE, VOCAB)
        self._target = target

    def forward(self, batch: StepBatch) -> ForwardResult:
        result = super().forward(batch)
        rows = [self._target(tuple(self._visible(batch, row))) for row in batch.logit_rows.tolist()]
        return ForwardResult(torch.from_numpy(np.stack(rows)), result.finite)


class TableDrafter:
    """A model drafter whose model is a table; `columns` are the target's ids of its draft vocabulary."""

    name = "early_exit"
    wants_top_ids = False

    def __init__(self, draft: Callable[[Ids], Floats], shape: Shape, columns: Sequence[int] | None, ops: Ops) -> None:
        self._draft = draft
        self._columns = None if columns is None else torch.tensor(columns)
        self.grower = TreeGrower(self.name, ops, shape, self._columns)
        self.proposed: list[DraftTree] = []

    def _logits(self, prefixes: Sequence[Ids]) -> Tensor:
        logits = torch.from_numpy(np.stack([self._draft(prefix) for prefix in prefixes]))
        return logits if self._columns is None else logits[:, self._columns]

    def start(self, view: DraftRow) -> None:
        """No state."""

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        prefixes = [tuple(row.token_ids) for row in rows]

        def expand(level: Level) -> Tensor:
            parents = [prefixes[parent] for parent in level.parents.tolist()]
            new = [(*above, token) for above, token in zip(parents, level.token_ids.tolist(), strict=True)]
            prefixes.extend(new)
            return self._logits(new)

        roots = [Root.of(row, cap) for row, cap in zip(rows, caps, strict=True)]
        trees = self.grower.grow(roots, self._logits(prefixes), expand)
        self.proposed += trees
        return trees

    def observe(self, view: DraftRow, result: StepResult) -> None:
        self.grower.learn(view.sequence_id, result)

    def stop(self, view: DraftRow) -> None:
        self.grower.forget(view.sequence_id)


class Bench:
    """An engine over tables that drafts chains of GAMMA."""

    def __init__(
        self,
        tables: Tables,
        verification: str = "block",
        columns: Sequence[int] | None = None,
        ops: Ops = OPS,
    ) -> None:
        speculation = SpeculationConfig(drafter="early_exit", num_draft_tokens=GAMMA, verification=verification)
        config = EngineConfig(
            cache=CacheConfig(page_size=PAGE, num_pages=NUM_PAGES),
            scheduler=SchedulerConfig(max_num_seqs=64),
            speculation=speculation,
        )
        limits = ModelLimits(
            vocab_size=VOCAB,
            max_model_len=64,
            pool_tokens=NUM_PAGES * PAGE,
            page_size=PAGE,
            max_num_seqs=64,
            eos_token_ids=(),
        )
        self.tables = tables
        self.runner = TableRunner(tables.target)
        self.drafter = TableDrafter(tables.draft, CHAIN, columns, ops)
        drafters = {"early_exit": self.drafter}
        self.engine = Engine(config, limits, self.runner, ops, PlainText(), drafters, Controller(speculation))

    def answers(self, requests: Sequence[Request]) -> dict[tuple[str, int], list[int]]:
        """Of all choices of all requests; so many at once that no prompt waits, since drafts wait for prompts."""
        told: dict[tuple[str, int], list[int]] = {}
        at_once = 64 // requests[0].params.n
        for start in range(0, len(requests), at_once):
            for asked in requests[start : start + at_once]:
                self.engine.submit(asked)
            while self.engine.has_work():
                for event in self.engine.step():
                    if isinstance(event, Delta):
                        ids = [token.token_id for token in event.tokens]
                        told.setdefault((event.request_id, event.index), []).extend(ids)
                    elif isinstance(event, Failed):
                        assert isinstance(event.error, NumericFault)
        assert self.engine.metrics.num_drafter_faults == 0
        return told

    def acceptance_length(self, requests: Sequence[Request]) -> float:
        self.answers(requests)
        return self.engine.metrics.speculation.acceptance_length


def requests_of(num_answers: int, **params: Any) -> list[Request]:
    """Seeds one after another; so long that a whole draft fits behind the first token."""
    asked: dict[str, Any] = {"temperature": 0.8, "max_tokens": GAMMA + 2, "n": 8} | params
    return [
        Request(request_id=f"r{seed}", prompt_token_ids=PROMPT, params=SamplingParams(seed=seed, **asked))
        for seed in range(num_answers // asked["n"])
    ]


# ---- the law --------------------------------------------------------------------------------------------------------


def law_of(target: Callable[[Ids], Floats], params: SamplingParams) -> dict[Ids, float]:
    """P(the first tokens), multiplied out with the oracle's processors and truncation."""
    asked = oracle.OracleParams(**{name: getattr(params, name) for name in oracle.OracleParams.__dataclass_fields__})

    @cache
    def probs(answer: Ids) -> NDArray[np.float64]:
        logits = oracle.process(target(PROMPT + answer), PROMPT, answer, asked)
        return np.exp(oracle.log_softmax(oracle.seen_by_draw(logits, asked)))

    every = itertools.product(range(VOCAB), repeat=LENGTH)
    return {ids: float(np.prod([probs(ids[:i])[token] for i, token in enumerate(ids)])) for ids in every}


def p_value(bench: Bench, num_answers: int, **params: Any) -> float:
    asked = requests_of(num_answers, **params)
    told = bench.answers(asked)
    assert all(isinstance(tree, SampledChain) for tree in bench.drafter.proposed)
    assert bench.engine.metrics.speculation.num_accepted_tokens > num_answers / 8
    law = law_of(bench.tables.target, asked[0].params)
    return chi_square(Counter(tuple(ids[:LENGTH]) for ids in told.values()), law, num_answers)


LAWS: dict[str, tuple[Tables, Sequence[int] | None, dict[str, Any]]] = {
    "plain": (off_by(0.9), None, {}),
    "penalties": (off_by(0.9), None, {"repetition_penalty": 1.6, "frequency_penalty": 0.7, "presence_penalty": 0.4}),
    "truncated": (off_by(0.9), None, {"top_k": 3, "top_p": 0.9, "temperature": 1.2}),
    "draft vocabulary": (off_by(0.9), (3, 0, 1), {}),
    "trap of drafts": (DRAFT_TRAP, None, {"temperature": 1.0}),
    "trap of coins": (COIN_TRAP, None, {"temperature": 1.0}),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_joint_law_is_the_targets(name: str) -> None:
    tables, columns, params = LAWS[name]
    assert p_value(Bench(tables, columns=columns), NUM_ANSWERS, **params) > THRESHOLD


def test_banned_ids_are_never_kept() -> None:
    """min_tokens and allowed ids change the target's law only: drafts of ids that it excludes end there."""
    bench = Bench(off_by(0.9))
    told = bench.answers(requests_of(400, stop_token_ids=(2,), min_tokens=LENGTH, allowed_token_ids=(0, 2, 3)))
    assert any(1 in tree.token_ids for tree in bench.drafter.proposed)
    assert {token for ids in told.values() for token in ids} == {0, 2, 3}
    assert not any(2 in ids[:LENGTH] for ids in told.values())


def test_what_is_not_finite_ends_the_answer_where_plain_decoding_does() -> None:
    """Rows that see id 3 are not finite: answers run up to the first 3, and those runs have the target's law."""
    bench = Bench(off_by(0.9))
    bench.runner.fault_on = {3}
    asked = requests_of(NUM_ANSWERS // 2, n=1)
    told = [tuple(ids) for ids in bench.answers(asked).values()]
    assert all(3 not in ids[:-1] for ids in told)
    assert any(3 in tree.token_ids[:-1] for tree in bench.drafter.proposed)
    law: Counter[Ids] = Counter()

    def until_fault(ids: Ids) -> Ids:
        return ids[: ids.index(3) + 1] if 3 in ids else ids

    for ids, mass in law_of(some_target, asked[0].params).items():
        law[until_fault(ids)] += mass  # type: ignore[assignment]
    assert chi_square(Counter(ids[:LENGTH] for ids in told), dict(law), len(asked)) > THRESHOLD


def test_no_noise_is_looked_at_twice() -> None:
    """By a step of the same answer: what one kept tells something of all that it looked at."""

    class Watched:
        sample = None  # so that plain draws ask for their noise here as well

        def __init__(self) -> None:
            self.keys: Counter[tuple[int, int, int, int]] = Counter()

        def __getattr__(self, name: str) -> Any:
            return getattr(OPS, name)

        def noise(self, seed: Tensor, draw_index: Tensor, choice: Tensor, purpose: int, vocab_size: int) -> Tensor:
            columns = (seed.tolist(), draw_index.tolist(), choice.tolist())
            self.keys.update((*key, purpose) for key in zip(*columns, strict=True))
            return OPS.noise(seed, draw_index, choice, purpose, vocab_size)

    watched: Any = Watched()
    bench = Bench(off_by(1.5), ops=watched)
    bench.answers(requests_of(16, max_tokens=40))
    kinds = {purpose for *_, purpose in watched.keys}
    assert {PURPOSE_TARGET, PURPOSE_ACCEPTANCE, *map(draft_purpose, range(1, GAMMA + 1))} == kinds
    assert max(watched.keys.values()) == 1
    assert {purpose & 0xFF for purpose in map(draft_purpose, range(1, 65))} == {PURPOSE_DRAFT}


# ---- planted errors -------------------------------------------------------------------------------------------------


def _coins_by_position(real: Any, key: StepKey, purpose: int, size: int, ops: Ops) -> Floats:
    if purpose != PURPOSE_ACCEPTANCE:
        return np.asarray(real(key, purpose, size, ops))
    keys = [key._replace(draw_index=key.draw_index + i) for i in range(size)]
    return np.concatenate([real(one, purpose, 1, ops) for one in keys])


def _flatter(real: Any, chain: SampledChain, vocab_size: int) -> NDArray[np.float64]:
    rows = real(chain, vocab_size) ** 0.7
    return np.asarray(rows / rows.sum(axis=1, keepdims=True))


def _cut_where_unsure(real: Any, grower: TreeGrower, *arguments: Any) -> list[DraftTree]:
    kept = []
    for chain in real(grower, *arguments):
        sure = [probs[token] >= 0.25 for probs, token in zip(chain.draft_probs, chain.token_ids, strict=True)]
        kept.append(chain.keep(range(sure.index(False) if False in sure else len(sure))))
    return kept


def _plain_residual(real: Any, position: int, weights: Any, target_probs: Any, draft_probs: Any) -> Any:
    return real(position, np.ones_like(weights), target_probs, draft_probs)


PLANTED: dict[str, tuple[Tables, Any, str, Callable[..., Any]]] = {
    "draft noise by position alone": (DRAFT_TRAP, grow, "draft_purpose", lambda real, depth: PURPOSE_DRAFT),
    "the target's noise for drafts": (DRAFT_TRAP, grow, "draft_purpose", lambda real, depth: PURPOSE_TARGET),
    "acceptance noise by position alone": (COIN_TRAP, block, "_noise", _coins_by_position),
    "another q than was sampled from": (off_by(0.9), SampledChain, "rows", _flatter),
    "a chain that ends where an id was unlikely": (off_by(0.9), TreeGrower, "grow", _cut_where_unsure),
    "residual of p - q": (RESIDUAL_TRAP, block, "block_residual", _plain_residual),
}


@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_are_caught(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, owner, name, wrong = PLANTED[error]
    real = getattr(owner, name)

    def planted(*arguments: Any) -> Any:
        return wrong(real, *arguments)

    monkeypatch.setattr(owner, name, planted)
    value = p_value(Bench(tables), NUM_ANSWERS, temperature=1.0)
    assert value < THRESHOLD


# ---- what it is good for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.5, 1.0, 1.5])
def test_a_block_keeps_more_than_a_coupled_chain(spread: float) -> None:
    asked = requests_of(128, max_tokens=50, temperature=1.0)
    block_length = Bench(off_by(spread)).acceptance_length(asked)
    coupled = Bench(off_by(spread), "coupled").acceptance_length(asked)
    print(f"logit noise {spread}: acceptance length {block_length:.3f} as a block, {coupled:.3f} coupled")
    assert block_length > coupled > 1.2


def test_a_drafter_that_is_the_target_is_always_kept() -> None:
    bench = Bench(Tables(some_target, some_target))
    bench.answers(requests_of(64, max_tokens=30))
    told = bench.engine.metrics.speculation
    assert told.num_accepted_tokens == told.num_draft_tokens > 500


# ---- when it is used ------------------------------------------------------------------------------------------------


def answer_of(drafter: str | None = None, **params: Any) -> Answer:
    asked = Request(
        request_id="r",
        prompt_token_ids=PROMPT,
        params=SamplingParams(**params),
        speculation=SpeculationParams(drafter=drafter),
    )
    table = PageTable(PagePool(1, PAGE))
    return Answer(request=asked, choice=0, seed=1, arrival=0, token_ids=list(PROMPT), table=table)


def test_it_is_used_for_sampled_chains_only() -> None:
    config = SpeculationConfig(drafter="eagle", verification="block")
    assert verification_of(answer_of(), config) == "block"
    assert verification_of(answer_of("draft_model", temperature=1e-5), config) == "block"
    assert verification_of(answer_of(temperature=0.9e-5), config) == "coupled"
    assert verification_of(answer_of("suffix"), config) == "coupled"
    assert verification_of(answer_of("off"), config) == "coupled"
    assert verification_of(answer_of(grammar=GrammarSpec("json_object")), config) == "coupled"
    assert verification_of(answer_of(), SpeculationConfig(drafter="eagle")) == "coupled"


@pytest.mark.parametrize("drafter", ["auto", "off", "ngram", "suffix", "recycling", "prediction"])
def test_a_drafter_that_does_not_sample_is_refused(drafter: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SpeculationConfig(drafter=drafter, verification="block")
    assert str(refused.value) == (
        "verification is 'block', which needs a drafter that samples from a distribution of its own: draft_model,"
        f" early_exit, eagle; drafter is {drafter!r}, and what it guesses is verified coupled"
    )


# ---- chains ---------------------------------------------------------------------------------------------------------


def chain_of(*probs: Sequence[float], ids: Ids = (1, 0), **fields: Any) -> SampledChain:
    known: dict[str, Any] = {"parents": tuple(range(-1, len(ids) - 1)), "drafters": ("d",) * len(ids)} | fields
    return SampledChain(token_ids=ids, draft_probs=tuple(np.array(row, np.float64) for row in probs), **known)


def test_a_chain_is_cut_with_its_distributions() -> None:
    whole = chain_of((0.2, 0.8), (0.5, 0.5), survival=(0.5, 0.2))
    assert whole.fault(2) is None
    cut = whole.prune(1, 5)
    assert isinstance(cut, SampledChain)
    assert (cut.token_ids, len(cut.draft_probs), cut.survival) == ((1,), 1, (0.5,))
    assert whole.prune(2, 0).fault(2) is None and not len(whole.prune(2, 0))


@pytest.mark.parametrize(
    ("chain", "why"),
    [
        (chain_of((0.2, 0.8)), "2 sampled nodes and 1 distributions"),
        (chain_of((0.2, 0.7), (0.5, 0.5)), "node 0 from what is no distribution"),
        (chain_of((0.2, 0.8), (float("nan"), 0.5)), "node 1 from what is no distribution"),
        (chain_of((1.0, 0.0), (0.5, 0.5)), "node 0 from what is no distribution"),
        (chain_of((-0.2, 1.2), (0.5, 0.5)), "node 0 from what is no distribution"),
        (chain_of((0.2, 0.8), (0.5, 0.5), parents=(-1, -1)), "is no chain"),
        (chain_of((0.2, 0.8), (0.5, 0.5), ids=(1, 9)), "outside the vocabulary"),
    ],
)
def test_what_cannot_be_verified_says_why(chain: SampledChain, why: str) -> None:
    assert why in str(chain.fault(2))


def grown(logits: Callable[[Ids], Any], seed: int, cap: int = 4, shape: Shape = DEEP) -> SampledChain:
    prefixes: list[Ids] = [()]

    def first(path: Ids) -> Tensor:
        return torch.tensor(np.array(logits(path), np.float32))[None]

    def expand(level: Level) -> Tensor:
        [parent], [token] = level.parents.tolist(), level.token_ids.tolist()
        prefixes.append((*prefixes[parent], token))
        return first(prefixes[-1])

    [tree] = TreeGrower("d", OPS, shape).grow([Root("s", 5, cap, 0.5, seed, 0, samples=True)], first(()), expand)
    assert isinstance(tree, SampledChain) and tree.fault(VOCAB) is None
    return tree


def test_its_length_and_its_estimates_tell_nothing_of_its_ids() -> None:
    """Even where one id leads to a row that is not finite."""

    def logits(path: Ids) -> list[float]:
        return [float("nan")] * VOCAB if path[-1:] == (2,) else [0.0, 1.0, 2.0, 3.0]

    chains = [grown(logits, seed) for seed in range(40)]
    assert len({chain.token_ids for chain in chains}) > 5
    assert {(len(chain), chain.survival) for chain in chains} == {(4, (0.5, 0.25, 0.125, 0.0625))}
    sure = torch.softmax(torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64) / 0.5, 0).numpy()
    for chain in chains:
        for node, probs in enumerate(chain.draft_probs):
            expected = np.full(VOCAB, 1 / VOCAB) if chain.token_ids[:node][-1:] == (2,) else sure
            assert probs == pytest.approx(expected)


def test_rounds_that_do_not_pay_shorten_every_chain_alike() -> None:
    shape = Shape(round_cost=0.25)
    lengths = {len(grown(partial(random_logits, salt=41, spread=2.0), seed, 8, shape)) for seed in range(20)}
    assert lengths == {2}


# ---- the real drafters ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(tiny_llama(tied=False, hidden=64, layers=3), tmp_path_factory.mktemp("sharp") / "llama")


OPTIONS = {"num_draft_tokens": 4, "verification": "block"}


@pytest.mark.parametrize("situation", ["alone", "mates", "preempted", "prefix_hit", "chunked", "n3"])
def test_greedy_answers_are_those_without_drafts(folder: Path, situation: str) -> None:
    made = SITUATIONS[situation]
    requests = [item for item in made.requests("greedy") if item.params.temperature == 0.0]
    off = EngineHarness(folder, **made.options).run(requests, made.arrivals)
    harness = EngineHarness(folder, "early_exit", **OPTIONS, **made.options)
    on = harness.run(requests, made.arrivals)
    assert on.answers == off.answers
    assert {start.verification for start in on.started.values()} == {"coupled"}
    assert sum(end.speculation.num_draft_tokens for end in on.finished.values()) > 0


def test_a_block_tells_so_and_can_be_repeated(folder: Path) -> None:
    """Beside greedy mates, with log-probabilities and several choices."""
    asked = [
        request("a", "sampled", prompt(1, 20), temperature=1.0, n=3, logprobs=2, logprobs_mode="processed"),
        request("b", "greedy", prompt(2, 30)),
        request("c", "sampled", prompt(3, 9), temperature=0.7, top_p=0.8, frequency_penalty=0.5),
    ]
    first, second = (EngineHarness(folder, "early_exit", **OPTIONS) for _ in range(2))
    run = first.run(asked)
    assert {name: start.verification for name, start in run.started.items()} == {
        "a": "block",
        "b": "coupled",
        "c": "block",
    }
    assert run.answers == second.run(asked).answers
    assert first.engine.metrics.num_drafter_faults == 0
    assert all(run.finished[key].speculation.num_accepted_tokens > 0 for key in ("a/0", "a/1", "a/2", "c/0"))
    told = [token.logprobs for key in ("a/0", "a/1", "a/2") for token in run.tokens[key]]
    assert all(probs is not None and np.isfinite(probs.logprob) for probs in told)


@pytest.mark.parametrize("drafter", ["early_exit", "draft_model"])
def test_a_drafter_that_computes_what_the_target_does_is_always_kept(folder: Path, drafter: str) -> None:
    """So what it says it sampled from is what the target draws from, to rounding."""
    own = {"early_exit": {"early_exit_layers": 3}, "draft_model": {"draft_model": str(folder)}}
    harness = EngineHarness(folder, drafter, **OPTIONS, **own[drafter])
    run = harness.run([request("a", "sampled", prompt(1, 20), temperature=1.0, n=4)])
    told = [end.speculation for end in run.finished.values()]
    assert sum(s.num_accepted_tokens for s in told) == sum(s.num_draft_tokens for s in told) > 50


def test_an_eagle_head_samples_in_its_own_vocabulary(folder: Path, tmp_path: Path) -> None:
    """Beside a greedy request, whose tree grows in the same forwards and whose answer stays what it is."""
    config = head_config(json.loads((folder / "config.json").read_text()), eagle_aux_hidden_state_layer_ids=[1])
    head = write_head(tmp_path / "head", config, head_tensors(config, num_features=1))
    asked = [request("a", "sampled", prompt(1, 20), temperature=1.3), request("b", "greedy", prompt(2, 30))]
    off = EngineHarness(folder).run(asked)
    harness = EngineHarness(folder, "eagle", eagle_head=str(head), **OPTIONS)
    on = harness.run(asked)
    assert on.answers["b/0"] == off.answers["b/0"]
    assert (on.started["a"].verification, on.started["b"].verification) == ("block", "coupled")
    assert harness.engine.metrics.num_drafter_faults == 0
    assert all(end.speculation.num_draft_tokens > 30 for end in on.finished.values())
