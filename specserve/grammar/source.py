"""How a grammar and a vocabulary become llguidance's objects: the same way in the trial and in the engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specserve.constraint import GrammarSpec
from specserve.errors import FieldViolation, GrammarInvalid

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_MESSAGE_LEN = 500
# Shared by all answers that follow one compiled grammar, then renewed. 0.1 kB (a bounded string) to 2 kB each; a
# string of at most n characters has n states.
MAX_LEXER_STATES = 50_000
# Below llguidance's million: eager work on large lexemes stops earlier (`((a{1000}){1000}){1000}`: 0.2 s, not 5).
INITIAL_LEXER_FUEL = 300_000
# As json.dumps writes: free whitespace lets a small model pad an object for ever, and a fixed text is forced text.
JSON_FORMAT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The model's ids: a tokenizer.json as text, the number of logits, and every id that ends an answer."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def load(self) -> LLTokenizer:
        """Takes about a second.

        Raises:
            ValueError: llguidance cannot read this tokenizer.
        """
        from llguidance import LLTokenizer

        return LLTokenizer(self.tokenizer_json, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids) or None)


def source_of(spec: GrammarSpec) -> str:
    """The grammar as llguidance reads it; nothing is checked here."""
    from llguidance import LLMatcher

    if isinstance(spec.value, tuple):
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_lark_text, spec.value)))
    match spec.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(spec.value, defaults=JSON_FORMAT)  # type: ignore[arg-type]
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=JSON_FORMAT)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(spec.value)
        case "lark":
            return LLMatcher.grammar_from_lark(spec.value)
    raise ValueError(f"no such kind of grammar: {spec.kind!r}")


def _lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def new_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        verbose_errors=False, max_lexer_states=MAX_LEXER_STATES, initial_lexer_fuel=INITIAL_LEXER_FUEL
    )
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def why(matcher: LLMatcher) -> str:
    text = matcher.get_error().replace("<non-verbose/>", "").strip()
    return text if len(text) <= MAX_MESSAGE_LEN else text[:MAX_MESSAGE_LEN] + " …"


def invalid(description: str) -> GrammarInvalid:
    return GrammarInvalid([FieldViolation("grammar", description)])
