"""What the structure tests look at: our modules, found on disk, and the imports in them, read from the syntax tree.

Nothing is imported to be inspected. Generated code (`*_pb2*`) is no module of ours, but may be imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "specserve": ROOT / "specserve",
    "specserve_kernels": ROOT / "kernels" / "specserve_kernels",
    "specserve_drafts": ROOT / "drafts" / "specserve_drafts",
}
COMPUTED = "<computed>"
PURE = (
    "errors",
    "config",
    "events",
    "request",
    "proposal",
    "constraint",
    "validation",
    "pages",
    "prefix",
    "scheduler",
    "costs",
    "survival",
    "goodput",
    "controller",
)


@dataclass(frozen=True)
class Module:
    """One Python file of ours: `specserve.server.grpc`, or `specserve.server` for an `__init__.py`."""

    name: str
    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@dataclass(frozen=True)
class Import:
    """`target` as written and resolved: a module, or `module.name` if the statement does not tell them apart."""

    target: str
    line: int
    typing_only: bool


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            if path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found.append(Module(".".join([package, *parts]), path))
    return tuple(found)


def pure_modules() -> list[str]:
    """The pure modules that exist, left to right."""
    names = {module.name for module in modules()}
    return [f"specserve.{name}" for name in PURE if f"specserve.{name}" in names]


def imports(text: str, module: str, is_package: bool = False) -> Iterator[Import]:
    """Every import of a module, function-level and TYPE_CHECKING ones too; `COMPUTED` where its name is no constant."""
    tree = ast.parse(text)
    for node, typing_only in _walk(tree, False):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, node.lineno, typing_only)
            case ast.ImportFrom(names=names):
                base = _base(node, module, is_package)
                for alias in names:
                    yield Import(f"{base}.{alias.name}", node.lineno, typing_only)
            case ast.Call(args=[first, *_]) if _called(node) in ("import_module", "__import__"):
                target = first.value if isinstance(first, ast.Constant) else COMPUTED
                yield Import(str(target), node.lineno, typing_only)


def _walk(node: ast.AST, typing_only: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, typing_only
    guarded = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, typing_only or (guarded and field == "body"))


def _base(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The absolute name of what a `from … import` imports from."""
    if not node.level:
        return node.module or ""
    package = module.split(".") if is_package else module.split(".")[:-1]
    kept = package[: len(package) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
