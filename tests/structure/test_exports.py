"""What a package exports is what it says in `__all__`, no more, no less, in order."""

from __future__ import annotations

import ast
import importlib
import importlib.util

import pytest
from structure.source import PACKAGES


def exported(text: str) -> tuple[set[str], set[str]]:
    """Public names that an `__init__` must list, and those that it may.

    Must: what it defines, and imports from our packages that it does not use itself (under TYPE_CHECKING they are
    lazy exports). May: imports that it uses, too.
    """
    tree = ast.parse(text)
    defined: set[str] = set()
    for item in tree.body:
        match item:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                defined.add(name)
            case ast.Assign(targets=targets):
                defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] in PACKAGES):
            imported |= {alias.asname or alias.name for alias in node.names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    must, may = defined | (imported - used), defined | imported
    return {name for name in must if not name.startswith("_")}, may


def order(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions: what ruff's RUF022 asks for."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_what_is_exported(package: str) -> None:
    text = (PACKAGES[package] / "__init__.py").read_text(encoding="utf-8")
    declared = list(getattr(importlib.import_module(package), "__all__", []))
    assert declared == sorted(set(declared), key=order)
    must, may = exported(text)
    assert must <= set(declared) <= may, f"not listed: {must - set(declared)}; not there: {set(declared) - may}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_export_is_there(package: str) -> None:
    module = importlib.import_module(package)
    homes: dict[str, str] = getattr(module, "_HOME", {})
    for name in getattr(module, "__all__", []):
        if name in homes and importlib.util.find_spec(f"{package}.{homes[name]}") is None:
            continue
        assert getattr(module, name) is not None


def test_lazy_exports_are_complete() -> None:
    import specserve

    assert set(specserve._HOME) == set(specserve.__all__)
    assert set(dir(specserve)) == {*specserve.__all__, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = specserve.Nonsense


def test_the_reader_reads() -> None:
    text = "import os\nfrom typing import Any\nfrom specserve.llm import LLM, Request\n"
    text += "_A = 1\nB: int = 2\ndef f(x: Request): y = 1\nclass C: z = 1"
    assert exported(text) == ({"B", "C", "LLM", "f"}, {"_A", "B", "C", "LLM", "Request", "f"})
