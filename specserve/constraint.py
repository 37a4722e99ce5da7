"""What an answer may look like, as the caller writes it: a grammar, bounded before anybody compiles it.

Only the record, its limits, and how tokens that a grammar forces are laid over a draft. What compiles a grammar and
knows the allowed tokens is `specserve.grammar`; doors and requests need not load it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from specserve.config import nearest
from specserve.proposal import DraftTree

GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "lark", "choice")
MAX_GRAMMAR_BYTES = 1 << 16
MAX_CHOICES = 1024
MAX_CHOICE_LEN = 1024
FORCED = "forced"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """One grammar. `value` is the schema (JSON text), the regex (Rust syntax, whole answer), the Lark grammar, the
    choices, or "" for `json_object`. Whatever a caller puts in can be constructed; `grammar_violations` judges it.
    """

    kind: str
    value: str | tuple[str, ...] = ""

    def __post_init__(self) -> None:
        if isinstance(self.value, list):
            object.__setattr__(self, "value", tuple(self.value))

    @property
    def num_bytes(self) -> int:
        """Length of all its text in UTF-8."""
        texts = (self.value,) if isinstance(self.value, str) else self.value
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def grammar_violations(spec: GrammarSpec, field: str = "grammar") -> list[tuple[str, str]]:
    """What is wrong with a grammar before it is compiled, as (field, description)."""
    if spec.kind not in GRAMMAR_KINDS:
        return [(f"{field}.kind", f"is {spec.kind!r}. {nearest(str(spec.kind), GRAMMAR_KINDS)}")]
    found = _choice_violation(spec) if spec.kind == "choice" else _text_violation(spec)
    if found is None and spec.num_bytes > MAX_GRAMMAR_BYTES:
        found = f"has {spec.num_bytes} bytes; allowed: {MAX_GRAMMAR_BYTES}"
    if found is None and not _is_unicode(spec.value):
        found = "has half a surrogate pair; send valid Unicode"
    return [] if found is None else [(f"{field}.{spec.kind}", found)]


def _text_violation(spec: GrammarSpec) -> str | None:
    if not isinstance(spec.value, str):
        return f"is a {type(spec.value).__name__}; it must be text"
    if spec.kind == "json_object":
        return "takes no value; use json_schema for a schema" if spec.value else None
    return None if spec.value else "is empty"


def _choice_violation(spec: GrammarSpec) -> str | None:
    if not isinstance(spec.value, tuple) or not all(isinstance(text, str) for text in spec.value):
        return "must be a list of texts"
    if not 1 <= len(spec.value) <= MAX_CHOICES:
        return f"has {len(spec.value)} choices; allowed: 1 to {MAX_CHOICES}"
    if any(not 1 <= len(text) <= MAX_CHOICE_LEN for text in spec.value):
        return f"must have choices of 1 to {MAX_CHOICE_LEN} characters"
    return None


def _is_unicode(value: Iterable[str]) -> bool:
    return not any("\ud800" <= char <= "\udfff" for text in value for char in text)


def with_forced(tree: DraftTree, forced: SequenceOf[int], cap: int) -> DraftTree:
    """A tree of at most `cap` nodes: the forced chain first, then what of `tree` follows it to its end.

    Args:
        forced: ids that the grammar forces below the root, in order; nodes of that chain are named "forced".
        cap: how many nodes are allowed, the forced ones included.

    Nodes of `tree` on the chain are one node with it, its siblings are dropped: a forced token has none. Where
    `tree` knows how to go on after the chain's end, its nodes go on there, in their own order.
    """
    if not forced or cap < 1:
        return tree.prune(max(cap, 0), len(tree))
    chain = list(forced[:cap])
    token_ids, parents, drafters = list(chain), list(range(-1, len(chain) - 1)), [FORCED] * len(chain)
    end = len(chain) - 1
    place: dict[int, int] = {-1: -1}  # node of `tree` → its node in the result
    for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        above = place.get(parent)
        if above is None:
            continue
        if above < end:
            if chain[above + 1] == token_id:
                place[node] = above + 1
        elif len(token_ids) < cap:
            place[node] = len(token_ids)
            token_ids.append(token_id)
            parents.append(above)
            drafters.append(tree.drafters[node])
    return DraftTree(tuple(token_ids), tuple(parents), tuple(drafters))
