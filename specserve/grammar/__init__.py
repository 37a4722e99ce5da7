"""Grammars at work: compiled once, off the engine's thread, and then followed token by token by llguidance.

Anybody may send a grammar, and a short one can cost minutes, gigabytes or the whole process (a Lark file of chained
rules overflows the stack). So each is tried first in a child process with limits on CPU time, memory and stack; only
what survives is compiled here. A state keeps two
matchers. One consumes committed tokens and nothing else. The other scouts draft trees and is thrown away when in
doubt, so nothing that a rejected draft did can stay.
"""

from __future__ import annotations

from specserve.grammar.compiler import Compilation, GrammarCompiler
from specserve.grammar.state import Grammar, GrammarState, Packed, allowed_ids

__all__ = ["Compilation", "Grammar", "GrammarCompiler", "GrammarState", "Packed", "allowed_ids"]
