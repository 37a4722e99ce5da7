"""Token recycling: what the target found likely after a token once, it will find likely again.

Of every row whose logits were computed, rejected ones included, the eight best ids are kept: for the pair of tokens
that the row ends with, and for its last token alone. From a root they make a tree, best first: a node's children are
the successors of its pair, or else of its token, or else what came with specserve (successors.py). How likely the
first, second, … of them is, is learned from what the target draws, apart for each kind of entry. Rejected rows are
worth a tenth of the acceptance length. Prompt rows had no logits; of tokens that nothing is known of, their kept hidden
states go through the head once the first token is out, where nothing came with specserve.
Source: Token Recycling (Luo et al., 2024), which knows single tokens and one fixed tree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from specserve.forward import Forward
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.request import GREEDY_TEMPERATURE
from specserve_drafts.merge import Sprout, merge
from specserve_drafts.successors import Successors, pair_of

NUM_SUCCESSORS = 8

# All tables together; an entry takes 400 bytes, and a row of logits makes two.
MAX_ENTRIES = 1 << 18

# Prompt rows that go through the head in a step, and in all of one prompt.
MAX_READ_A_STEP = 64
MAX_READ = 256

# Chance of each successor before anything is known, from greedy answers of the demo model; it weighs as much as so many
# draws. Old counts fade by halving.
_PRIOR = (0.46, 0.12, 0.06, 0.035, 0.025, 0.02, 0.015, 0.01)
_PRIOR_WEIGHT = 8.0
_MEMORY = 2048.0

_NEW, _CHANGED, _CONFIRMED = range(3)


class Entry(NamedTuple):
    """Ids, best first. `state`: whether the best one was it the last time, too. `owner`: the sequence that saw them."""

    ids: Sequence[int]
    state: int
    owner: str


class Table:
    """The last seen successors of contexts; a context is a token, or a pair of them. The oldest are forgotten first."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}

    def put(self, previous: int, token_id: int, ids: Sequence[int], owner: str) -> None:
        """What may follow these two tokens, and so the second."""
        for context in (token_id, pair_of(previous, token_id)):
            old = self.entries.pop(context, None)
            state = _NEW if old is None else _CONFIRMED if old.ids[0] == ids[0] else _CHANGED
            self.entries[context] = Entry(ids, state, owner)

    def drop_oldest(self, count: int) -> None:
        for context in list(islice(self.entries, count)):
            del self.entries[context]


class Tables:
    """A table per tenant, bounded together: the least recently used one loses its oldest entries first."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.num_entries = 0
        self._max_entries = max_entries
        self._tables: dict[Hashable, Table] = {}  # least recently used first
        self._counted: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def of(self, tenant: Hashable) -> Table:
        """Its table, empty if it has none yet."""
        table = self._tables.pop(tenant, None) or Table()
        self._tables[tenant] = table
        return table

    def grown(self, tenant: Hashable) -> None:
        """The tenant's table, just used, has new entries: keep the bound."""
        self._count(tenant)
        spare = self._max_entries // 64  # some more at once: a dict finds its oldest entries slowly
        while self.num_entries > self._max_entries:
            oldest = next(iter(self._tables))
            self._tables[oldest].drop_oldest(self.num_entries - self._max_entries + spare)
            self._count(oldest)
            if not self._tables[oldest].entries:
                self.drop(oldest)

    def drop(self, tenant: Hashable) -> None:
        """Forget a tenant."""
        self._tables.pop(tenant, None)
        self.num_entries -= self._counted.pop(tenant, 0)

    def _count(self, tenant: Hashable) -> None:
        size = len(self._tables[tenant].entries)
        self.num_entries += size - self._counted.get(tenant, 0)
        self._counted[tenant] = size


class Ranks:
    """How often the target drew the first, second, … successor, by kind of entry. Counts only: nobody's text."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, list[float]] = {}  # hits by rank, then trials
        self._chances: dict[Hashable, tuple[float, ...]] = {}

    def chances(self, kind: Hashable) -> tuple[float, ...]:
        """Chance of each successor of an entry of this kind, given that the target is at its context."""
        known = self._chances.get(kind)
        if known is None:
            *hits, trials = self._counts.get(kind) or [0.0] * (NUM_SUCCESSORS + 1)
            weight = _PRIOR_WEIGHT
            known = tuple((n + prior * weight) / (trials + weight) for n, prior in zip(hits, _PRIOR, strict=True))
            self._chances[kind] = known
        return known

    def count(self, kind: Hashable, ids: Sequence[int], drawn: int) -> None:
        """The target drew a token after these successors."""
        counts = self._counts.setdefault(kind, [0.0] * (NUM_SUCCESSORS + 1))
        if counts[-1] >= _MEMORY:
            counts[:] = [value / 2 for value in counts]
        counts[-1] += 1
        if drawn in ids:
            counts[ids.index(drawn)] += 1
        self._chances.pop(kind, None)


class RecyclingDrafter:
    """Trees from what the target itself once thought of next; no model of its own.

    `shipped` is what it begins with. Only without it, and with a `forward`, are prompts read: that gives 1.4 % longer
    acceptance then and 0.2 % beside a shipped table, which is less than it costs (demo model, 15 nodes in `auto`).
    """

    name = "recycling"
    wants_top_ids = True

    def __init__(self, forward: Forward | None = None, shipped: Successors | None = None) -> None:
        self.tables = Tables()
        self._forward = forward if shipped is None else None
        self._shipped = shipped
        self._ranks = Ranks()
        self._unread: dict[str, list[int]] = {}  # prompt positions to look up, next one last
        if self._forward is not None:
            self._forward.kept.keep(hidden=True)

    def start(self, view: DraftRow) -> None:
        if self._forward is not None:
            self._unread[view.sequence_id] = self._worth_reading(view)

    def stop(self, view: DraftRow) -> None:
        self._unread.pop(view.sequence_id, None)
        if not view.salt or not self.tables.of(view.salt).entries:
            self.tables.drop(_tenant(view))

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        self.read_prompts(rows)
        return [merge((), cap, self.sprout(row)) for row, cap in zip(rows, caps, strict=True)]

    def sprout(self, row: DraftRow) -> Sprout:
        """Grows trees below the row's root, of as many nodes as anybody wants."""
        find, ranks = self._finder(row), self._ranks

        def successors(previous: int, token_id: int) -> Iterable[tuple[int, float]]:
            ids, kind = find(previous, token_id)
            return zip(ids, ranks.chances(kind), strict=False)

        return Sprout(self.name, successors, *_last_two(row.token_ids, len(row.token_ids)))

    def observe(self, view: DraftRow, result: StepResult) -> None:
        """Learn from the draws of the committed rows, then take over the successors of all rows."""
        find, first = self._finder(view), len(view.token_ids) - len(result.tokens)
        for end, drawn in enumerate(result.tokens, first):
            ids, kind = find(*_last_two(view.token_ids, end))
            self._ranks.count(kind, ids, drawn)
        if result.top_ids:
            self._take_over(view, result, *_last_two(view.token_ids, first))

    def _take_over(self, view: DraftRow, result: StepResult, previous: int, root: int) -> None:
        table, tree, owner = self.tables.of(_tenant(view)), result.tree, view.sequence_id
        on_path = set(result.path)
        rejected = [node for node in range(len(tree)) if node not in on_path]
        for node in (*rejected, *result.path):  # what lies on the path is true, and so it comes last
            parent = tree.parents[node]
            above = tree.token_ids[parent] if parent >= 0 else root
            table.put(above, tree.token_ids[node], result.top_ids[1 + node], owner)
        table.put(previous, root, result.top_ids[0], owner)
        self.tables.grown(_tenant(view))

    def _finder(self, row: DraftRow) -> Callable[[int, int], tuple[Sequence[int], Hashable]]:
        """What is known to follow two tokens, and what kind of knowledge that is.

        A pair tells more than its token; what this sequence showed, more than what was shipped, and that, the sum of
        many texts, more than what another sequence showed last.
        """
        entries, shipped = self.tables.of(_tenant(row)).entries, self._shipped
        owner, mode = row.sequence_id, _mode(row)

        def find(previous: int, token_id: int) -> tuple[Sequence[int], Hashable]:
            pair = pair_of(previous, token_id)
            for context, is_pair in ((pair, True), (token_id, False)):
                entry = entries.get(context)
                if entry is not None and entry.owner == owner:
                    return entry.ids, (mode, is_pair, entry.state)
                if shipped is not None:
                    ids = shipped.after_pair(pair) if is_pair else shipped.after(token_id)
                    if ids:
                        return ids, (mode, is_pair)
                if entry is not None:
                    return entry.ids, (mode, is_pair, entry.state, "another's")
            return (), mode

        return find

    # ---- prompt rows

    def _worth_reading(self, view: DraftRow) -> list[int]:
        """Where tokens without an entry occur last in the prompt."""
        known = self.tables.of(_tenant(view)).entries
        last = {token_id: i for i, token_id in enumerate(view.token_ids[: view.prompt_len]) if token_id not in known}
        return sorted(last.values())[-MAX_READ:]

    @torch.inference_mode()
    def read_prompts(self, rows: Sequence[DraftRow]) -> None:
        """Take over the successors of some more prompt rows, from their kept hidden states."""
        forward = self._forward
        if forward is None:
            return
        reads: list[tuple[DraftRow, int]] = []
        for row in rows:
            unread = self._unread.get(row.sequence_id)
            while unread and len(reads) < MAX_READ_A_STEP:
                reads.append((row, unread.pop()))
        if not reads:
            return
        size = forward.page_size
        slots = [row.pages[i // size] * size + i % size for row, i in reads]
        hidden = forward.kept.hidden(torch.tensor(slots).to(forward.decoder.device))
        logits = forward.decoder.logits(hidden)
        best = forward.ops.top_ids(logits, min(NUM_SUCCESSORS, logits.shape[1])).tolist()
        for (row, i), ids in zip(reads, best, strict=True):
            tenant = _tenant(row)
            self.tables.of(tenant).put(*_last_two(row.token_ids, i + 1), ids, row.sequence_id)
            self.tables.grown(tenant)


def _tenant(row: DraftRow) -> Hashable:
    """Whose table the sequence uses: its salt's, or else its own."""
    return row.salt or (row.sequence_id,)


def _mode(row: DraftRow) -> int:
    """Chances are learned apart for greedy sequences, and for each half of a unit of temperature."""
    return 0 if row.temperature < GREEDY_TEMPERATURE else 1 + min(int(2 * row.temperature), 3)


def _last_two(token_ids: Sequence[int], end: int) -> tuple[int, int]:
    """The tokens before `end`, -1 where there is only one."""
    return token_ids[end - 2] if end > 1 else -1, token_ids[end - 1]
