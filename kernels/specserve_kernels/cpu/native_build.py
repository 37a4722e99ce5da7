"""Compiles the C++ kernels of `csrc/` into one shared library, once per user, source and compiler.

The library lies in `<cache>/<hash>/specserve_native.so`. A file lock keeps two processes from compiling at once, an
atomic rename keeps a third from loading half a file. Nothing here runs inside a request: `load()` builds at start,
`python -m specserve_kernels.cpu.native` ahead of it. One library holds the code of every instruction set, each in a
translation unit with its own flags; which one runs is decided when it is loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
# No contraction: a product and a sum fuse where the source says so, or a row's bits would hang on the compiler's mood.
COMMON = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
QUIET = ["-Wno-psabi", "-Wno-ignored-attributes", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"]
UNITS: dict[str, list[str]] = {"plain": [], "dispatch": []}
UNITS_X86: dict[str, list[str]] = {
    "plain": [],
    "avx512": AVX512,
    "vnni": [*AVX512, "-mavx512vnni"],
    "amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    "dispatch": ["-DSPEC_X86"],
}


class NativeUnavailable(RuntimeError):
    """The native kernels cannot be had here; the message says why."""


def cache_folder() -> Path:
    """`$SPECSERVE_NATIVE_CACHE`, else `specserve/native` in the user's cache folder."""
    if chosen := os.environ.get("SPECSERVE_NATIVE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specserve" / "native"


def _compiler() -> tuple[str, str]:
    """Path and version text of the compiler."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise NativeUnavailable(f"no C++ compiler: {name!r} is not on PATH")
    result = subprocess.run([path, "--version"], capture_output=True, text=True)
    if result.returncode:
        raise NativeUnavailable(f"{path} --version failed: {result.stderr.strip()[-500:]}")
    return path, result.stdout


def _units() -> dict[str, list[str]]:
    return UNITS_X86 if platform.machine() in ("x86_64", "AMD64") else UNITS


def _hash(compiler: str) -> str:
    digest = hashlib.sha256(f"{compiler}|{COMMON}|{_units()}|{platform.machine()}".encode())
    for path in sorted(SOURCES.glob("*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise NativeUnavailable(f"compiling the native kernels failed: {' '.join(command)}\n{result.stderr[-2000:]}")


def _compile(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = []
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            jobs = []
            for unit, flags in _units().items():
                out = f"{scratch}/{unit}.o"
                objects.append(out)
                source = str(SOURCES / f"{unit}.cpp")
                jobs.append(pool.submit(_run, [compiler, *COMMON, *QUIET, *flags, "-c", source, "-o", out]))
            for job in jobs:
                job.result()
        library = f"{scratch}/library.so"
        _run([compiler, "-shared", "-fopenmp", *objects, "-o", library])
        os.replace(library, target)


def build(cache: Path | None = None) -> Path:
    """Path of the library, compiled if it is not there yet. Raises NativeUnavailable with the reason."""
    path, version = _compiler()
    folder = (cache or cache_folder()) / _hash(version)
    target = folder / "specserve_native.so"
    if target.exists():
        return target
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(path, target)
    except OSError as error:
        raise NativeUnavailable(f"cannot write the native kernels to {folder}: {error}") from error
    return target
