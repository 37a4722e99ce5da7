"""How many nodes each running sequence may draft, and which of the proposed ones are worth verifying.

Of a step both the seconds and the tokens can be predicted: the seconds from the machine's measured costs, the tokens
from what the sequences' trees have been worth. Nodes are taken, best first over the whole batch, as long as tokens a
second rise; where not even the best ones raise them nobody is asked, but for rare probes. Pure policy: whatever it
answers, the drawn tokens are the same (coupled verification); only time is at stake.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import compress
from math import ceil

from specserve.config import SpeculationConfig
from specserve.constraint import FORCED
from specserve.costs import Drafted, DraftSeconds, FollowedCosts, StepCosts, StepLoad
from specserve.goodput import Asking, Choice, asked_for, best_level, best_prefix
from specserve.proposal import DraftTree, StepResult
from specserve.request import Sequence
from specserve.scheduler import PlannedRows
from specserve.survival import PROBE_TREES, QUIET_STEPS, Probes, Prospect, Track, outcome

DEFAULT_NODES = 5  # where costs were not measured
DRAFTING_STEPS = 3  # so long caps stand; where nobody drafts, QUIET_STEPS
CONTROL_PERIOD, CONTROL_GAIN = 64, 1.3  # steps; one of them is plain, where drafting gains no more than that


def drafter_of(sequence: Sequence, config: SpeculationConfig) -> str:
    """The drafter that guesses for this sequence."""
    return sequence.request.speculation.drafter or config.drafter


def fixed_nodes(sequence: Sequence, config: SpeculationConfig) -> int | None:
    """The number of nodes that the request or the engine fixed; None = the controller's choice."""
    wanted = sequence.request.speculation.num_draft_tokens
    return config.num_draft_tokens if wanted is None else wanted


class Controller:
    """Draft budgets of an engine. Without `costs` each tree has 5 nodes and none is trimmed. Seconds are at scale 1."""

    def __init__(self, config: SpeculationConfig, costs: StepCosts | None = None) -> None:
        self.config = config
        self._costs = None if costs is None else FollowedCosts(costs)
        self._tracks: dict[Sequence, Track] = {}
        self._shared: dict[str, Prospect] = {}
        self._drafting: dict[str, DraftSeconds] = {}
        self._probes = Probes()
        self._step = 0
        self._rate = 0.0  # tokens a second that this step should reach
        self._standing = (0, 0)  # until this step caps stand, if so many sequences are running and none is new
        self._control_at = CONTROL_PERIOD

    @property
    def costs(self) -> StepCosts | None:
        """What steps cost, as it is known by now."""
        return None if self._costs is None else self._costs.now

    @property
    def scale(self) -> float:
        """How many times as long as at start-up steps take."""
        return 1.0 if self._costs is None else self._costs.scale

    def budgets(self, roots: SequenceOf[Sequence], num_prompt_rows: int) -> list[int]:
        """Node cap of each sequence's next tree; 0 = its drafter is not called."""
        tracks = [self._tracks.get(sequence) or self._open(sequence) for sequence in roots]
        if self._costs is not None and any(track.fixed is None for track in tracks):
            self._step += 1
            until, num_running = self._standing
            if self._step >= until or num_running != len(roots):
                context = sum(sequence.table.cached_len for sequence in roots)
                if self._budget(tracks, num_prompt_rows, context, self._costs):
                    return [track.fixed or 0 for track in tracks]
        return [track.cap for track in tracks]

    def _open(self, sequence: Sequence) -> Track:
        drafter = drafter_of(sequence, self.config)
        fixed = 0 if drafter == "off" else fixed_nodes(sequence, self.config)
        fixed = DEFAULT_NODES if fixed is None and self._costs is None else fixed
        shared = self._shared.setdefault(drafter, Prospect())
        self._drafting.setdefault(drafter, DraftSeconds())
        self._standing, sampled = (0, 0), not sequence.request.params.greedy
        return self._tracks.setdefault(sequence, Track(drafter, fixed, sampled, shared, self._step))

    def _budget(self, tracks: list[Track], num_prompt_rows: int, context: int, costs: FollowedCosts) -> bool:
        """Set the caps; True if this step should be plain all the same, so that the two sizes can be compared."""
        free = [track for track in tracks if track.fixed is None]
        for track in free:
            track.rest(self._step)
        load = StepLoad(len(tracks), sum(track.fixed or 0 for track in tracks), num_prompt_rows, context=context)
        names = [track.drafter for track in free]
        trees = {name: self._drafting[name].tree(names.count(name)) for name in {*names}}
        nodes = {name: self._drafting[name].node(names.count(name)) for name in trees}
        most = sum(track.prospect.most_nodes for track in free)
        asking = Asking(sum(map(trees.__getitem__, names)), sum(map(nodes.__getitem__, names)) / len(free), most)
        extra = context / len(tracks) * costs.now.node_context
        extra += sum(track.sampled for track in free) / len(free) * costs.now.sampled
        choice = best_level([track.prospect.counts for track in free], load, costs.now, asking, extra)
        self._rate = choice.rate
        for track in free:
            counts = track.prospect.counts
            cap = asked_for(choice.wanted(counts))
            drafting = trees[track.drafter] + nodes[track.drafter] * min(cap, track.prospect.most_nodes)
            cap = ceil(min(cap, track.prospect.peak)) if choice.gain(counts) > choice.rate * drafting else 0
            track.give(cap, self._step, load.num_rows)
        if any(track.cap for track in free):
            self._standing = (self._step + DRAFTING_STEPS, len(tracks))
            self._probes.drafting(self._step)
            return self._is_control(choice, load, costs)
        self._standing = (self._step + QUIET_STEPS, len(tracks))
        if self._probes.due(self._step):
            self._probes.sent(self._step)
            min(free, key=lambda track: track.rested_at).probe()
        return False

    def _is_control(self, choice: Choice, load: StepLoad, costs: FollowedCosts) -> bool:
        clear = choice.rate * costs.now.seconds(load) > CONTROL_GAIN * load.num_sequences
        same_size = costs.tile(load.num_rows) == costs.tile(load.num_rows + choice.nodes)
        wanted = self._step >= self._control_at and not clear and not same_size
        self._control_at = self._step + CONTROL_PERIOD if wanted else self._control_at
        return wanted

    def trim(self, plans: SequenceOf[PlannedRows], trees: SequenceOf[DraftTree]) -> list[DraftTree]:
        """The trees without nodes that are not worth their rows, the whole batch taken together.

        Trees of a fixed size, probes, and trees with forced nodes are kept whole.
        """
        trees = list(trees)
        if self._costs is None:
            return trees
        costs, num_rows = self._costs.now, 0
        judged: list[tuple[int, Track, list[float]]] = []  # place of the tree, its track, its survivals
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
                track.saw(survivals, len(tree), PROBE_TREES)
                continue
            seconds = plan.sequence.table.cached_len * costs.node_context + track.sampled * costs.sampled
            judged.append((i, track, survivals))
            worths += [value * (1.0 - self._rate * costs.accepted) - self._rate * seconds for value in survivals]
        kept = best_prefix(worths, num_rows, self._rate, costs)
        # in a large batch trees are looked at in turns, but all of them where they were asked for in vain
        first, stride, in_vain = 0, 1 + len(judged) // 5, not any(kept)
        for i, track, survivals in judged:
            nodes = list(compress(range(len(survivals)), kept[first : first + len(survivals)]))
            first += len(survivals)
            trees[i] = trees[i].keep(nodes) if len(nodes) < len(survivals) else trees[i]
            track.saw(survivals, len(nodes), stride if in_vain or (self._step + i) % stride == 0 else 0.0)
            if survivals and not nodes:
                track.why = (num_rows, track.prospect.acceptance)
        return trees

    def learn(self, sequence: Sequence, step: StepResult) -> None:
        """What the target made of a tree."""
        track = self._tracks.get(sequence)
        if self._costs is None or track is None:
            return
        if track.probing:
            self._probes.came_back(self._step, bool(step.path) and track.shared.acceptance < 0.5)
        told = len(step.tree) and FORCED not in step.tree.drafters
        track.learn(outcome(step.tree, step.path) if told else None)

    def measured(self, load: StepLoad, seconds: float, drafting: Mapping[str, Drafted]) -> float:
        """What a step took without drafting, and what each drafter took; returns what was predicted."""
        if self._costs is None:
            return 0.0
        predicted = self._costs.now.seconds(load) * self._costs.scale
        if not load.num_prompt_rows:
            self._costs.follow(load, seconds)
        for name, spent in drafting.items():
            self._drafting[name].follow(spent._replace(seconds=spent.seconds / self._costs.scale))
        return predicted

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
        if self._costs is not None and track is not None and track.why is not None:
            num_rows, acceptance = track.why
            ratio = self._costs.now.rows(num_rows) / self._costs.now.rows(1)
            cost = f"the controller verified no draft: {num_rows} rows a step take {ratio:.1f} times as long as one"
            return f"{cost}; with {acceptance:.0%} of drafts beginning right none pays"
        if not sequence.num_asked:
            return "there was never room to draft: the answer's end, pages or the token budget were too near"
        return f"drafter {drafter!r} proposed nothing"
