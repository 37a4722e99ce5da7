"""Starting is cheap, and no module needs another to be imported before it.

One fresh interpreter checks the pure layer, one checks `--help`, and one imports every module first: it loads the
third-party packages once and forks a child per module, so that each child starts with none of ours loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from structure.source import PACKAGES, ROOT, imports, modules, pure_modules

HEAVY = (
    "torch",
    "transformers",
    "grpc",
    "numpy",
    "triton",
    "safetensors",
    "gguf",
    "tokenizers",
    "accelerate",
    "google",
)

IMPORTS_ONLY_OURS = """
import sys
before = set(sys.modules)
for name in sys.argv[1:]:
    __import__(name)
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - sys.stdlib_module_names - {"specserve"}))
"""

HELP = """
import runpy, sys
heavy = sys.argv[1:]
sys.argv = ["specserve", "--help"]
code = "returned without exiting"
try:
    runpy.run_module("specserve.cli", run_name="__main__", alter_sys=True)
except SystemExit as stop:
    code = stop.code
print(code, *sorted(set(heavy) & set(sys.modules)), file=sys.stderr)
"""

EACH_FIRST = """
import importlib, json, os, sys, traceback
third_party, ours = json.loads(sys.stdin.read())
for name in third_party:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for name in ours:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
        except BaseException:
            print("importing", name, "first:", traceback.format_exc(), flush=True)
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
"""


def run(code: str, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "0", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *args],
        cwd=ROOT,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_pure_layer_loads_nothing_but_itself() -> None:
    done = run(IMPORTS_ONLY_OURS, "specserve", *pure_modules())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"importing the pure modules loads {done.stdout}"


def test_the_check_would_see_another_package() -> None:
    assert "msgspec" in run(IMPORTS_ONLY_OURS, "specserve", "msgspec").stdout.split()


def test_help_loads_nothing_heavy() -> None:
    if not any(module.name.startswith("specserve.cli") for module in modules()):
        pytest.skip("there is no command line yet")
    done = run(HELP, *HEAVY)
    code, *loaded = done.stderr.splitlines()[-1].split()
    assert code in ("0", "None"), done.stderr
    assert "Usage" in done.stdout
    assert loaded == [], f"`specserve --help` loads {loaded}"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a child per module")
def test_every_module_imports_first() -> None:
    tops = {item.target.split(".")[0] for module in modules() for item in imports(module.text, module.name)}
    third_party = sorted(tops - sys.stdlib_module_names - set(PACKAGES))
    ours = [module.name for module in modules() if not module.name.endswith("__main__")]
    done = run(EACH_FIRST, stdin=json.dumps([third_party, ours]))
    assert done.returncode == 0, done.stderr
    assert not done.stdout, done.stdout
