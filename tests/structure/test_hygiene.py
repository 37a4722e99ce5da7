"""Small rules that nobody should have to remember: no pickle, no stray package, one version, no leftovers."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from structure.source import PACKAGES, ROOT, imports, modules

import specserve

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.hub.load", "torch.jit.load", "yaml.load"}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "managers", "manager", "misc", "common"}

# In halves, so that this file does not mention them.
LEFTOVERS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
_HOSTS = ("py" + "pi.org", "python" + "hosted.org", "download.py" + "torch.org", "npm" + "js.org", "npm" + "js.com")
REGISTRY_HOSTS = re.compile("|".join(map(re.escape, (*_HOSTS, "deb.deb" + "ian.org", "conda.ana" + "conda.org"))))
OUTSIDE = re.compile(r"\.\./sha" + r"red|/work/|shared/(DESIGN|research|proto)")

SKIPPED_FOLDERS = {"__pycache__", "build", "dist", "node_modules"}


def repository_files() -> Iterator[tuple[Path, str]]:
    """Every text file of the repository; hidden folders hold nothing of ours but `.ci`."""
    folders = [ROOT]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.is_dir():
                hidden = path.name.startswith(".") and path.name != ".ci"
                if not hidden and path.name not in SKIPPED_FOLDERS and path.suffix != ".egg-info":
                    folders.append(path)
                continue
            data = path.read_bytes()
            if b"\0" not in data[:8192]:
                yield path.relative_to(ROOT), data.decode("utf-8")


def places(pattern: re.Pattern[str], inside: tuple[str, ...] = ()) -> list[str]:
    """`file:line: match` of every match in the repository, or below the given folders."""
    found = []
    for path, text in repository_files():
        if inside and not str(path).startswith(inside):
            continue
        for match in pattern.finditer(text):
            found.append(f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}")
    return found


def unsafe(module: str, text: str) -> list[str]:
    found = []
    for item in imports(text, module):
        if item.target.split(".")[0] in UNSAFE_MODULES or item.target in UNSAFE_CALLS:
            found.append(f"{module}:{item.line} imports {item.target}")
    nodes = list(ast.walk(ast.parse(text)))
    safe = {id(node.func) for node in nodes if isinstance(node, ast.Call) and _only_reads_weights(node)}
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in UNSAFE_CALLS and id(node) not in safe:
            found.append(f"{module}:{node.lineno} uses {ast.unparse(node)}")
    return found


def _only_reads_weights(call: ast.Call) -> bool:
    """`torch.load(…, weights_only=True)`: an unpickler that knows tensors and nothing else."""
    wanted = [word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords]
    return ast.unparse(call.func) == "torch.load" and any(wanted)


def test_nothing_runs_data() -> None:
    found = [fault for module in modules() for fault in unsafe(module.name, module.text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from torch import load",
        "def f(x):\n    return torch.load(x)",
        "torch.load(x, weights_only=False)",
        "run = eval",
        "yaml.load(f)",
    ],
)
def test_the_checker_catches(text: str) -> None:
    assert len(unsafe("m", text)) == 1


def test_the_checker_allows() -> None:
    text = "model.eval()\nyaml.safe_load(f)\ntorch.utils.cpp_extension.load(name)\ntorch.load(x, weights_only=True)"
    assert unsafe("m", text) == []


def test_folders_are_no_packages() -> None:
    """A bare importable `kernels` shadows the package of that name that transformers probes for."""
    stray = [
        name for name in ("kernels", "drafts", "proto", "tests", "bench") if (ROOT / name / "__init__.py").exists()
    ]
    assert not stray, f"remove __init__.py from: {stray}"


def test_packages_are_typed() -> None:
    assert all((folder / "py.typed").exists() for folder in PACKAGES.values())


def test_modules_say_what_they_are() -> None:
    vague = [module.name for module in modules() if BANNED_NAMES & set(module.name.split("."))]
    assert not vague, f"name these after what they do: {vague}"


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d+\.\d+\.\d+\S*)", changelog, re.MULTILINE)
    assert newest is not None, "CHANGELOG.md has no version heading"
    assert {project["version"], newest[1]} == {specserve.__version__}


def test_no_leftovers() -> None:
    assert not places(LEFTOVERS)


def test_no_registry_is_named() -> None:
    assert not places(REGISTRY_HOSTS)


def test_packages_stand_alone() -> None:
    """Nothing outside the repository is referred to from code that is shipped."""
    assert not places(OUTSIDE, ("specserve/", "kernels/", "drafts/", "proto/"))
