"""Compiling: what is refused and why, the second time as well as the first; never a crash, a hang, or a full memory."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time

import pytest
from grammar.conftest import TINY_EOS, Vocab
from tiny import tiny_tokenizer

from specserve.constraint import GrammarSpec
from specserve.errors import GrammarInvalid, InvalidRequest, Overloaded, Unavailable
from specserve.grammar import Grammar, GrammarCompiler


def schema(value: object) -> GrammarSpec:
    return GrammarSpec("json_schema", value if isinstance(value, str) else json.dumps(value))


def chained(rule: str) -> str:
    return f"start: {rule}0\n" + "\n".join(f"{rule}{i}: {rule}{i + 1}" for i in range(4000)) + f'\n{rule}4000: "a"'


REFUSED = {
    "bad pattern": (schema({"type": "string", "pattern": "("}), "unclosed group"),
    "pattern is a number": (schema({"type": "string", "pattern": 5}), "pattern"),
    "unknown type": (schema({"type": "strung"}), "strung"),
    "type is a number": (schema({"type": 5}), "type"),
    "no JSON": (schema("{"), "line 1"),
    "matches nothing": (schema({"not": {}}), ""),
    "no object": (schema("false"), "object"),
    "refers to itself": (schema({"$ref": "#"}), "matches no text"),
    "remote reference": (schema({"$ref": "http://127.0.0.1:9/x.json"}), "not present"),
    "deep schema": (schema('{"type":"array","items":' * 2000 + "{}" + "}" * 2000), "recursion limit"),
    "large schema": (
        schema({"allOf": [{"anyOf": [{"properties": {f"k{i}_{j}": {}}} for j in range(6)]} for i in range(8)]}),
        "too large",
    ),
    "30k parentheses, regex": (GrammarSpec("regex", "(" * 30_000 + ")" * 30_000), "invalid regex"),
    "30k parentheses, lark": (GrammarSpec("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000), "nested"),
    "look-ahead": (GrammarSpec("regex", "(?=a)a"), "look-around"),
    "back-reference": (GrammarSpec("regex", r"(a)\1"), "backreferences"),
    "empty class": (GrammarSpec("regex", "[a&&b]"), "matches no text"),
    "not lark": (GrammarSpec("lark", "start = a"), ""),
    "never ends": (GrammarSpec("lark", 'start: start "a"'), "matches no text"),
    "max_tokens": (GrammarSpec("lark", 'start: a "x"\na[ max_tokens = 3]: /.*/'), "max_tokens"),
    "stop": (GrammarSpec("lark", 'start: a "x"\na[stop="q"]: /.*/'), "stop="),
    "ambiguous": (GrammarSpec("lark", 'start: e\ne: e e | e e e | "a" | "b"'), "to follow"),
    "a special choice": (GrammarSpec("choice", ("<|im_end|>",)), "special token '<|im_end|>'"),
    "one special choice of two": (GrammarSpec("choice", ("yes", "no<|im_end|>")), "choice 'no<|im_end|>' contains"),
    "a special constant": (schema({"const": "<|im_end|>"}), "special token that ends it"),
    "an end inside": (GrammarSpec("lark", 'start: "a" <|im_end|> "b"'), "1 tokens into an answer"),
    # these two overflow the stack: they end the process that compiles them
    "chained rules": (GrammarSpec("lark", chained("r")), "stack"),
    "chained terminals": (GrammarSpec("lark", chained("T")), "stack"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_grammar_is_refused_twice(name: str, tiny: Vocab) -> None:
    spec, words = REFUSED[name]
    for _ in range(2):
        with pytest.raises(GrammarInvalid) as caught:
            tiny.compiler.compile(spec).get(60)
        assert caught.value.reason == "GRAMMAR_INVALID"
        assert caught.value.status == "INVALID_ARGUMENT"
        assert words in str(caught.value)
        assert len(str(caught.value)) < 1000
    assert tiny.allowed(tiny.start("regex", "a"))  # and the next one compiles


def test_over_a_limit_is_refused_before_any_thread(tiny: Vocab) -> None:
    with pytest.raises(InvalidRequest, match="allowed: 65536"):
        tiny.compiler.compile(GrammarSpec("regex", "a" * 70_000))


def test_cpu_time_is_limited() -> None:
    compiler = GrammarCompiler(tiny_tokenizer().to_str(), 302, TINY_EOS, cpu_seconds=1)
    try:
        began = time.monotonic()
        with pytest.raises(GrammarInvalid, match="1 s of CPU time"):
            compiler.compile(GrammarSpec("regex", "a?" * 16_000)).get(60)
        assert time.monotonic() - began < 30
        assert compiler.compile(GrammarSpec("regex", "a?")).get(60).start()
    finally:
        compiler.close()


def test_compiling_does_not_block(tiny: Vocab) -> None:
    began = time.monotonic()
    compilation = tiny.compiler.compile(GrammarSpec("regex", "x?" * 3000))
    assert time.monotonic() - began < 0.5
    while not compilation.done:
        assert compilation.try_get() is None or compilation.done
        time.sleep(0.005)


def test_waiting_for_a_grammar_blocks_nobody_and_a_cancel_is_private(tiny: Vocab) -> None:
    async def scene() -> Grammar:
        compilation = tiny.compiler.compile(GrammarSpec("regex", "y?" * 150))
        gone, stays = (asyncio.create_task(compilation.wait()) for _ in range(2))
        await asyncio.sleep(0)
        assert not any(thread.name.startswith("asyncio_") for thread in threading.enumerate())
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        grammar = await stays
        assert grammar is compilation.get() is await compilation.wait()
        with pytest.raises(GrammarInvalid):
            await tiny.compiler.compile(GrammarSpec("regex", "((")).wait()
        return grammar

    assert asyncio.run(scene()).start()


def test_pending_grammars_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.grammar.compiler.MAX_PENDING", 2)
    compiler = GrammarCompiler(tiny_tokenizer().to_str(), 302, TINY_EOS)
    try:
        first = [compiler.compile(GrammarSpec("regex", text)) for text in ("a?" * 3000, "b")]
        with pytest.raises(Overloaded, match="2 grammars wait"):
            compiler.compile(GrammarSpec("regex", "c"))
        assert compiler.compile(GrammarSpec("regex", "b")) is first[1]
        first[1].get(60)
        time.sleep(0.05)
        last = [compiler.compile(GrammarSpec("regex", text)) for text in ("c", "d")][1]
    finally:
        compiler.close()
    with pytest.raises((Unavailable, GrammarInvalid)):
        last.get(60)


def test_the_same_grammar_is_compiled_once_and_the_cache_is_bounded() -> None:
    compiler = GrammarCompiler(tiny_tokenizer().to_str(), 302, TINY_EOS, cache_bytes=3_000_000)
    try:
        first = compiler.compile(GrammarSpec("regex", "a0"))
        grammar = first.get(60)
        assert compiler.compile(GrammarSpec("regex", "a0")) is first
        for i in range(1, 30):
            compiler.compile(GrammarSpec("regex", f"a{i}")).get(60)
        compiler.compile(GrammarSpec("regex", "a29"))
        assert 0 < compiler.cached_bytes <= 3_000_000
        assert compiler.compile(GrammarSpec("regex", "a0")) is not first
        assert grammar.start()  # who holds an evicted one keeps it
    finally:
        compiler.close()


def test_failures_count_for_the_cache_too() -> None:
    compiler = GrammarCompiler(tiny_tokenizer().to_str(), 302, TINY_EOS, cache_bytes=20_000)
    try:
        for i in range(40):
            with pytest.raises(GrammarInvalid):
                compiler.compile(GrammarSpec("regex", "(" * 100 + str(i))).get(60)
        compiler.compile(GrammarSpec("regex", "(")).done  # noqa: B018
        assert compiler.cached_bytes <= 20_000 + 2_000
    finally:
        compiler.close()


def test_without_llguidance_the_request_is_told(tiny: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'specserve\[grammar\]'"):
        tiny.compiler.compile(GrammarSpec("regex", "never seen"))


def test_a_tokenizer_that_llguidance_cannot_read() -> None:
    compiler = GrammarCompiler("{}", 302, TINY_EOS)
    try:
        with pytest.raises(GrammarInvalid, match="this model's tokenizer"):
            compiler.compile(GrammarSpec("regex", "a")).get(60)
    finally:
        compiler.close()
