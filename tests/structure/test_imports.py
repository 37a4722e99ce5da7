"""Who may import whom: the table of docs/architecture.md, held against every import statement that we have.

The table governs our three packages and torch. Other packages are free outside the pure layer, and in the pure
layer nothing but the standard library is.
"""

from __future__ import annotations

import sys

import pytest
from structure.source import COMPUTED, PACKAGES, PURE, imports, modules

PURE_ROWS = frozenset(PURE)
TORCH = "torch"

# What each row may import besides itself. A row is one module or one folder; the longest matching name counts.
TABLE: dict[str, frozenset[str]] = {
    "specserve_kernels": frozenset({TORCH}),
    "processors": PURE_ROWS,
    "sample": PURE_ROWS | {"processors", "specserve_kernels", "grammar", TORCH},
    "block": PURE_ROWS | {"specserve_kernels", TORCH},
    "verify": PURE_ROWS | {"specserve_kernels", TORCH},
    "batch": PURE_ROWS | {"specserve_kernels", "grammar", TORCH},
    "grammar": PURE_ROWS | {TORCH},
    "tokenizer": PURE_ROWS,
    "metrics": PURE_ROWS,
    "trace": PURE_ROWS,
    "answertext": PURE_ROWS,
    "logprobs": PURE_ROWS | {"batch", "processors", "sample", TORCH},
    "choice": PURE_ROWS | {"answertext", "processors", "grammar"},
    "commit": PURE_ROWS | {"answertext"},
    "publish": PURE_ROWS | {"choice", "commit"},
    "drafting": PURE_ROWS | {"metrics", "trace", "waits"},
    "models": frozenset({"config", "errors", "specserve_kernels", TORCH}),
    "runner": PURE_ROWS | {"batch", "kept", "models", "specserve_kernels", TORCH},
    "kept": frozenset({TORCH}),
    "forward": frozenset({"kept", "models", "specserve_kernels", TORCH}),
    "specserve_drafts": PURE_ROWS
    | {"batch", "block", "forward", "sample", "models", "grammar", "specserve_kernels", TORCH},
    "buckets": frozenset(),
    "gpu_memory": PURE_ROWS | {"buckets"},
    "graphs": frozenset({TORCH}),
    "gpu_runner": PURE_ROWS | {"batch", "buckets", "graphs", "models", "runner", "specserve_kernels", TORCH},
    "waits": PURE_ROWS | {"batch", "block", "choice", "processors"},
    "drawing": PURE_ROWS | {"choice", "batch", "block", "processors", "sample", "commit", "metrics", "waits"},
    "engine": PURE_ROWS
    | {"batch", "processors", "sample", "logprobs", "drawing", "verify", "answertext", "choice", "commit", "publish"}
    | {"drafting", "grammar", "metrics", "trace"},
    "sweep": PURE_ROWS | {"batch", "runner", "engine"},
    "v1": frozenset(),
    "provenance": frozenset(),
    "tables": frozenset(),
    "prompts": PURE_ROWS,
    "loadgen": PURE_ROWS | {"v1", "metrics"},
}
TABLE["gpu_build"] = TABLE["gpu_runner"] | {"gpu_memory", "gpu_runner"}
TABLE["build"] = PURE_ROWS | {*TABLE, TORCH} - {"v1", "loadgen", "provenance", "tables"}
_OFFLINE = PURE_ROWS | {"build", "engine", "metrics"}
TABLE |= dict.fromkeys(("llm", "acceptance", "lessons", "proof"), _OFFLINE)
# its runner is a model, and its drafters come through build
TABLE["sim"] = _OFFLINE | {"batch", "runner", "specserve_kernels", TORCH}
TABLE["llm"] = _OFFLINE | {"grammar"}
TABLE["acceptance"] = _OFFLINE | {"llm", "loadgen", "tables"}
TABLE["server.worker"] = _OFFLINE | {"server", "grammar"}  # the protocols that every door knows the engine by
TABLE["specserve_drafts.train"] = TABLE["specserve_drafts"] | {"specserve_drafts", "llm"}
TABLE["server"] = PURE_ROWS | {"tokenizer", "metrics", "trace", "v1"}
_ALL = PURE_ROWS | {row for row in TABLE if not row.startswith(("specserve_kernels", "specserve_drafts"))}
TABLE["cli"] = _ALL | {"specserve", "cli.train"}
TABLE["cli.train"] = TABLE["cli"] | {"cli", "specserve_drafts", "specserve_drafts.train"}
TABLE["specserve"] = PURE_ROWS | {"llm"}

# The engine gets its runner and its kernels handed to it: it names their types and never loads their modules.
TYPING_ONLY = dict.fromkeys(("engine", "drawing"), frozenset({"runner", "specserve_kernels"}))
# These two roots pick a module of their own by name, when it is first asked for; everybody else spells imports out.
COMPUTES_NAMES = {"specserve", "specserve_kernels"}


def row_of(target: str) -> str | None:
    """The row that a dotted name of ours belongs to, None if it belongs to none."""
    parts = target.split(".")
    if parts[0] == "specserve":
        if len(parts) == 1 or parts[1] == "__version__":
            return "specserve"
        parts = parts[1:]
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in TABLE or name in PURE_ROWS:
            return name
    return None


def _home(target: str) -> str:
    """`specserve.LLM` is `specserve.llm`: an export of the lazy root counts as an import of its home."""
    import specserve

    parts = target.split(".")
    if parts[0] == "specserve" and len(parts) == 2 and parts[1] in specserve._HOME:
        return f"specserve.{specserve._HOME[parts[1]]}"
    return target


def _pure_fault(row: str, target: str, typing_only: bool) -> str | None:
    top = target.split(".")[0]
    if top not in PACKAGES:
        return None if top in sys.stdlib_module_names else f"is pure and imports {target}"
    other = row_of(target)
    if other not in PURE_ROWS:
        return f"is pure and imports {target}"
    if not typing_only and PURE.index(other) >= PURE.index(row):
        return f"imports {target}, which is not to its left in: {' '.join(PURE)}"
    return None


def _fault(row: str, target: str, typing_only: bool) -> str | None:
    """Why a module of `row` may not import `target`, or None."""
    target = _home(target)
    top = target.split(".")[0]
    if row in PURE_ROWS:
        return _pure_fault(row, target, typing_only)
    if top == TORCH:
        return None if TORCH in TABLE[row] else "imports torch"
    if top not in PACKAGES or target == "specserve.__version__":
        return None
    other = row_of(target)
    allowed = TABLE[row] | {row} | (TYPING_ONLY.get(row, frozenset()) if typing_only else frozenset())
    return None if other in allowed else f"imports {target}"


def violations(module: str, text: str, is_package: bool = False) -> list[str]:
    row = row_of(module)
    if row is None or (row == "specserve" and module != "specserve"):
        return [f"{module} is in no row of the import table; add it to the table and to docs/architecture.md"]
    found = []
    for item in imports(text, module, is_package):
        if item.target == COMPUTED:
            fault = None if module in COMPUTES_NAMES else "imports a module whose name it computes"
        else:
            fault = _fault(row, item.target, item.typing_only)
        if fault:
            found.append(f"{module}:{item.line} {fault}")
    return found


def test_every_module_keeps_the_table() -> None:
    found = [fault for m in modules() for fault in violations(m.name, m.text, m.is_package)]
    assert not found, "\n".join(["the import table is broken:", *found])


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("specserve.pages", "import torch", "is pure and imports torch"),
        ("specserve.pages", "import msgspec", "is pure and imports msgspec"),
        ("specserve.pages", "from specserve.scheduler import plan", "not to its left"),
        ("specserve.pages", "def f():\n    from specserve import scheduler", "not to its left"),
        ("specserve.pages", "if TYPE_CHECKING:\n    import torch", "is pure and imports torch"),
        ("specserve.pages", "if TYPE_CHECKING:\n    from specserve.batch import Batch", "is pure"),
        ("specserve.pages", "from .engine import Engine", "is pure and imports specserve.engine"),
        ("specserve.request", "if not TYPE_CHECKING:\n    from specserve.pages import PageTable", "not to its left"),
        ("specserve.engine", "import torch.nn", "imports torch"),
        ("specserve.engine", "from specserve.runner import Runner", "imports specserve.runner"),
        ("specserve.engine", "from specserve import LLM", "imports specserve.llm"),
        ("specserve.engine", "import specserve", "imports specserve"),
        ("specserve.llm", "import specserve_drafts.ngram", "imports specserve_drafts"),
        ("specserve.cli.serve", "from specserve_drafts import make_drafter", "imports specserve_drafts"),
        ("specserve.models.decoder", "from specserve.request import Request", "imports specserve.request"),
        (
            "specserve.server.grpc",
            "if TYPE_CHECKING:\n    from specserve.engine import Engine",
            "imports specserve.engine",
        ),
        ("specserve.server.grpc", "from specserve.server.worker import Worker", "imports specserve.server.worker"),
        ("specserve_kernels.cpu.native", "from specserve.errors import ConfigError", "imports specserve.errors"),
        ("specserve_kernels.cpu.native", "import_module('specserve.errors')", "imports specserve.errors"),
        ("specserve_drafts.ngram", "from specserve.engine import Engine", "imports specserve.engine"),
        ("specserve_drafts.ngram", "importlib.import_module(name)", "name it computes"),
        ("specserve.misc", "", "in no row"),
    ],
)
def test_the_checker_catches(module: str, text: str, expected: str) -> None:
    found = violations(module, text)
    assert len(found) == 1, found
    assert expected in found[0]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("specserve.scheduler", "import heapq\nfrom specserve.pages import PagePool"),
        ("specserve.request", "if TYPE_CHECKING:\n    from specserve.pages import PageTable"),
        ("specserve.models.decoder", "from . import weights\nimport torch, gguf"),
        ("specserve.build", "from specserve_drafts import make_drafter\nimport torch"),
        ("specserve.engine", "if TYPE_CHECKING:\n    from specserve.runner import Runner"),
        ("specserve.cli.train", "from specserve_drafts.train import run"),
        ("specserve.server.worker", "from specserve.server import Served\nfrom specserve.build import build_engine"),
        ("specserve.server.grpc", "from specserve.v1 import inference_pb2\nfrom specserve import __version__"),
        ("specserve_drafts.train.run", "from specserve import LLM"),
    ],
)
def test_the_checker_allows(module: str, text: str) -> None:
    assert violations(module, text) == []
