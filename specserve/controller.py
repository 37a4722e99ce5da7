"""How many nodes each running sequence may draft, and which of the proposed ones are worth verifying.

Of a step both the seconds and the tokens can be predicted: the seconds from the machine's measured costs, the tokens
from what the sequences' trees have been worth. Nodes are taken, best first over the whole batch, as long as tokens a
second rise; where not even the best ones raise them nobody is asked, but for rare probes. Pure policy: whatever it
answers, the drawn tokens are the same (coupled verification); only time is at stake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from math import ceil
from operator import mul, sub
from typing import NamedTuple

from specserve.config import MAX_NUM_DRAFT_TOKENS, SpeculationConfig
from specserve.constraint import FORCED
from specserve.costs import DraftSeconds, Scale, StepCosts, StepLoad
from specserve.proposal import DraftTree, StepResult
from specserve.request import Sequence
from specserve.scheduler import PlannedRows
from specserve.survival import LEVELS, Probes, Prospect, level_counts, outcome

DEFAULT_NODES = 5  # where costs were not measured
MARGIN = 1.01  # drafting must promise so much more than not drafting
PROBE_NODES, PROBE_WEIGHT = 4, 8.0
QUIET_STEPS = 8  # so long a "nobody drafts" stands while the batch stays as large
PATIENCE, MAX_PATIENCE = 16, 512  # in so many steps a sequence that rests forgets why; doubled each time


def drafter_of(sequence: Sequence, config: SpeculationConfig) -> str:
    """The drafter that guesses for this sequence."""
    return sequence.request.speculation.drafter or config.drafter


def fixed_nodes(sequence: Sequence, config: SpeculationConfig) -> int | None:
    """The number of nodes that the request or the engine fixed; None = the controller's choice."""
    wanted = sequence.request.speculation.num_draft_tokens
    return config.num_draft_tokens if wanted is None else wanted


class _Track:
    """What is kept of one sequence. `fixed`: its cap is not ours. `why`: rows and acceptance when it got nothing."""

    def __init__(self, sequence: Sequence, drafter: str, fixed: int | None, shared: Prospect) -> None:
        self.drafter = drafter
        self.fixed = fixed
        self.cap = fixed or 0
        self.shared = shared
        self.prospect = Prospect(shared)
        self.sampled = not sequence.request.params.greedy
        self.probing = False
        self.patience = PATIENCE
        self.rested_at = 0
        self.why: tuple[int, float] | None = None


class _Choice(NamedTuple):
    """Draft nodes down to this level of survival (-1: none), at this price a node; `rate` is in tokens a second."""

    level: int
    rate: float
    price: float


class Controller:
    """Draft budgets of an engine. Without `costs` each tree has 5 nodes and none is trimmed.

    Seconds are those of the machine as it was measured (scale 1) wherever they are compared.
    """

    def __init__(self, config: SpeculationConfig, costs: StepCosts | None = None) -> None:
        self.config = config
        self.costs = costs
        self.scale = Scale()
        self._tracks: dict[Sequence, _Track] = {}
        self._shared: dict[str, Prospect] = {}
        self._drafting: dict[str, DraftSeconds] = {}
        self._probes = Probes()
        self._step = 0
        self._rate = 0.0
        self._quiet = (0, 0)  # until this step, if so many sequences are running

    def budgets(self, roots: SequenceOf[Sequence], num_prompt_rows: int) -> list[int]:
        """Node cap of each sequence's next tree; 0 = its drafter is not called."""
        tracks = [self._tracks.get(sequence) or self._open(sequence) for sequence in roots]
        if self.costs is not None and any(track.fixed is None for track in tracks):
            self._step += 1
            until, num_running = self._quiet
            if self._step >= until or num_running != len(roots):
                context = sum(sequence.table.cached_len for sequence in roots)
                self._budget(tracks, num_prompt_rows, context, self.costs)
        return [track.cap for track in tracks]

    def _open(self, sequence: Sequence) -> _Track:
        drafter = drafter_of(sequence, self.config)
        fixed = 0 if drafter == "off" else fixed_nodes(sequence, self.config)
        if fixed is None and self.costs is None:
            fixed = DEFAULT_NODES
        shared = self._shared.setdefault(drafter, Prospect())
        self._drafting.setdefault(drafter, DraftSeconds())
        track = self._tracks[sequence] = _Track(sequence, drafter, fixed, shared)
        track.rested_at = self._step
        return track

    def _budget(self, tracks: list[_Track], num_prompt_rows: int, context: int, costs: StepCosts) -> None:
        free = [track for track in tracks if track.fixed is None]
        for track in free:
            self._rest(track)
        num_fixed_nodes = sum(track.cap for track in tracks if track.fixed)
        load = StepLoad(len(tracks), num_fixed_nodes, num_prompt_rows, context=context)
        asked = Counter(track.drafter for track in free)
        share = {name: self._drafting[name].expected(count) / count for name, count in asked.items()}
        drafting = sum(share[name] * count for name, count in asked.items())
        extra = context / len(tracks) * costs.node_context
        extra += sum(track.sampled for track in free) / len(free) * costs.sampled
        choice = self._choose([track.prospect.counts for track in free], load, drafting, extra, costs)
        self._rate = choice.rate
        worth = [level * (1.0 - choice.rate * costs.accepted) - choice.price for level in LEVELS[: choice.level + 1]]
        num_drafting = 0
        for track in free:
            gain = sum(map(mul, worth, track.prospect.counts)) - choice.rate * share[track.drafter]
            if gain > 0:
                track.cap = min(ceil(1.5 * track.prospect.peak) + 2, MAX_NUM_DRAFT_TOKENS)
                num_drafting += 1
            else:
                self._send_to_rest(track, load.num_sequences + num_prompt_rows)
        if num_drafting:
            self._probes.drafting(self._step)
        else:
            self._quiet = (self._step + QUIET_STEPS, len(tracks))
            self._probe(free)

    def _choose(
        self, counts: list[list[float]], load: StepLoad, drafting: float, extra: float, costs: StepCosts
    ) -> _Choice:
        """The level of survival down to which nodes raise the expected tokens a second of the whole batch most."""
        num_rows = load.num_sequences + load.num_nodes + load.num_prompt_rows
        plain = costs.seconds(load)
        best = _Choice(-1, MARGIN * load.num_sequences / plain, 0.0)
        nodes = accepted = 0.0
        for level, count in enumerate(map(sum, zip(*counts, strict=True))):
            nodes += count
            accepted += count * LEVELS[level]
            more = costs.rows(num_rows + nodes) - costs.rows(num_rows) + nodes * extra
            rate = (load.num_sequences + accepted) / (plain + drafting + more + accepted * costs.accepted)
            if rate > best.rate:
                best = _Choice(level, rate, rate * more / nodes)
        return best

    def _rest(self, track: _Track) -> None:
        """A sequence that was not asked for a while leans on what others see meanwhile."""
        idle = self._step - track.rested_at
        if not track.cap and idle >= QUIET_STEPS:
            track.prospect.rest(min(idle / track.patience, 1.0))
            track.rested_at = self._step

    def _send_to_rest(self, track: _Track, num_rows: int) -> None:
        if track.cap:
            track.patience = min(2 * track.patience, MAX_PATIENCE)
            track.rested_at = self._step
        track.cap = 0
        track.why = (num_rows, track.prospect.first)

    def _probe(self, free: SequenceOf[_Track]) -> None:
        """Ask one sequence although it does not pay: the one that has rested longest."""
        if self._probes.due(self._step):
            self._probes.sent(self._step)
            track = min(free, key=lambda track: track.rested_at)
            track.cap, track.probing = PROBE_NODES, True

    def trim(self, plans: SequenceOf[PlannedRows], trees: SequenceOf[DraftTree]) -> list[DraftTree]:
        """The trees without nodes that are not worth their rows: of all prefixes of the nodes by survival, the best.

        Trees of a fixed size, probes, and trees with forced nodes are kept whole.
        """
        costs, trees = self.costs, list(trees)
        if costs is None:
            return trees
        num_rows = 0
        asked: list[tuple[int, _Track, list[float]]] = []  # place of the tree, its track, its survivals
        worths: list[float] = []  # of all nodes, tree after tree
        for i, (plan, tree) in enumerate(zip(plans, trees, strict=True)):
            num_rows += plan.num_pending
            track = self._tracks.get(plan.sequence) if plan.node_cap else None
            if track is None or track.fixed is not None or FORCED in tree.drafters:
                num_rows += len(tree)
                continue
            survivals = track.prospect.survival(tree)
            if track.probing:
                num_rows += len(tree)
                self._note(track, survivals, len(tree))
                continue
            price = plan.sequence.table.cached_len * costs.node_context + track.sampled * costs.sampled
            gain, price = 1.0 - self._rate * costs.accepted, self._rate * price
            asked.append((i, track, survivals))
            worths += [value * gain - price for value in survivals]
        order = sorted(range(len(worths)), key=worths.__getitem__, reverse=True)
        prices = [self._rate * seconds for seconds in costs.further_rows(num_rows, len(order))]
        values = list(map(sub, accumulate(map(worths.__getitem__, order), initial=0.0), prices))
        kept = set(order[: values.index(max(values))])
        first = 0
        for i, track, survivals in asked:
            nodes = [node for node in range(len(survivals)) if first + node in kept]
            first += len(survivals)
            trees[i] = trees[i].keep(nodes) if len(nodes) < len(survivals) else trees[i]
            self._note(track, survivals, len(nodes))
        return trees

    @staticmethod
    def _note(track: _Track, survivals: list[float], num_worth: int) -> None:
        counts = level_counts(survivals)
        for prospect in (track.prospect, track.shared):
            prospect.offered(counts, num_worth, track.probing)

    def learn(self, sequence: Sequence, step: StepResult) -> None:
        """What the target made of a tree."""
        track = self._tracks.get(sequence)
        if self.costs is None or track is None or not len(step.tree) or FORCED in step.tree.drafters:
            return
        seen, prospect = outcome(step.tree, step.path), track.prospect
        if track.probing:
            track.probing, track.cap = False, 0
            self._probes.came_back(self._step, bool(step.path))
            for doubted in (prospect, track.shared):
                doubted.doubt(PROBE_WEIGHT)
        if step.path:
            track.patience = PATIENCE
        track.shared.count(seen)
        prospect.count(seen)

    def measured(self, load: StepLoad, seconds: float, drafting: Mapping[str, tuple[int, float]]) -> float:
        """What a step took without drafting, and each drafter for so many sequences; returns what was predicted."""
        if self.costs is None:
            return 0.0
        predicted = self.costs.seconds(load)
        expected = predicted * self.scale.value
        if not load.num_prompt_rows:
            self.scale.follow(predicted, seconds)
        for name, (num_sequences, spent) in drafting.items():
            self._drafting[name].follow(num_sequences, spent / self.scale.value)
        return expected

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended."""
        self._tracks.pop(sequence, None)

    def inactive_reason(self, sequence: Sequence) -> str:
        """Why a sequence verified no draft at all, when nothing went wrong; asked before it is forgotten."""
        drafter, track = drafter_of(sequence, self.config), self._tracks.get(sequence)
        if drafter == "off":
            return "speculation is off"
        if fixed_nodes(sequence, self.config) == 0:
            return "num_draft_tokens is 0"
        if not sequence.stats.num_steps:
            return "the answer ended with its first token"
        if track is not None and track.why is not None and self.costs is not None:
            num_rows, acceptance = track.why
            ratio = self.costs.rows(num_rows) / self.costs.rows(1)
            return (
                f"the controller drafted nothing: a step of {num_rows} rows takes {ratio:.1f} times as long as one of a"
                f" single row; at the measured acceptance of {acceptance:.2f} no draft would pay"
            )
        if not sequence.num_asked:
            return "there was never room to draft: the answer's end, pages or the token budget were too near"
        return f"drafter {drafter!r} proposed nothing"
