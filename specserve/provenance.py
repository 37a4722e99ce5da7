"""Where a number comes from: commit, versions, machine, date and seed, so that a table can be made again.

Everything is read without importing what is asked about; what cannot be known here is told as "unknown".
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from specserve import __version__

PACKAGES = ("torch", "transformers", "numpy", "grpcio", "protobuf", "tokenizers")
ROOT = Path(__file__).resolve().parents[1]


def provenance(environment: str, seed: int) -> dict[str, Any]:
    """The record that every JSON result carries.

    Args:
        environment: the engine's own line about numerics, weights, kernels and threads.
    """
    return {
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": environment,
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.release()}",
            "load": os.getloadavg()[0],
        },
        "versions": {"specserve": __version__, "python": platform.python_version(), **_versions()},
        "seed": seed,
    }


def _commit() -> str:
    """The checkout's commit, with `+changes` when files differ from it."""
    try:
        head, changes = (
            subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10).stdout
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head.strip() + ("+changes" if changes.strip() else "")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found
