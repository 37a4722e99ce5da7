"""The engine can be read in a day: limits on lines, and a paragraph of intent at the top of every module.

A function's lines run from its `def` to its last line, docstring included. Generated code is not counted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from structure.source import PURE, modules

ENGINE = (
    *(name for name in PURE if name not in ("events", "validation", "constraint", "costs", "survival", "goodput")),
    "batch",
    "runner",
    "sample",
    "verify",
    "commit",
    "engine",
)
MAX_ENGINE_LINES = 2500
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 40

# Kernel bodies that are one loop nest and would not get clearer in pieces: "module:function".
LONG_KERNELS: frozenset[str] = frozenset({"specserve_kernels.triton.tree_attention:attend_kernel"})


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Qualified name and number of lines of every function."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}."
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield name.removesuffix("."), node.end_lineno - node.lineno + 1
        yield from functions(node, name)


def long_functions(module: str, text: str) -> dict[str, int]:
    return {f"{module}:{name}": n for name, n in functions(ast.parse(text)) if n > MAX_FUNCTION_LINES}


def test_the_engine_is_small() -> None:
    names = {f"specserve.{name}" for name in ENGINE}
    lines = {m.name: len(m.text.splitlines()) for m in modules() if m.name in names}
    assert sum(lines.values()) <= MAX_ENGINE_LINES, f"{sum(lines.values())} lines: {lines}"


def test_other_modules_are_small() -> None:
    names = {f"specserve.{name}" for name in ENGINE}
    lines = {m.name: len(m.text.splitlines()) for m in modules() if m.name not in names}
    long = {name: n for name, n in lines.items() if n > MAX_MODULE_LINES}
    assert not long, f"more than {MAX_MODULE_LINES} lines: {long}"


def test_functions_are_short() -> None:
    long = {name: n for m in modules() for name, n in long_functions(m.name, m.text).items()}
    unlisted = {name: n for name, n in long.items() if name not in LONG_KERNELS}
    assert not unlisted, f"more than {MAX_FUNCTION_LINES} lines: {unlisted}"
    assert set(long) >= LONG_KERNELS, f"listed, but short or gone: {sorted(LONG_KERNELS - set(long))}"
    assert all(name.startswith("specserve_kernels.") for name in LONG_KERNELS)


def test_modules_open_with_intent() -> None:
    silent = [m.name for m in modules() if m.name != "specserve.v1" and not ast.get_docstring(ast.parse(m.text))]
    assert not silent, f"no paragraph of intent at the top of: {silent}"


def test_the_counter_counts() -> None:
    body = "    pass\n" * 40
    text = f"class A:\n  @property\n  def f(self):\n{body}\n\n\nasync def g():\n" + "    pass\n" * 39
    assert long_functions("m", text) == {"m:A.f": 41}
