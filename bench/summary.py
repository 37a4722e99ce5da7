"""Puts the tables of results/*.json into results/summary.md, each with its date, commit and machine."""

from __future__ import annotations

import json
from pathlib import Path

from results import FOLDER


def section(path: Path) -> str:
    found = json.loads(path.read_text(encoding="utf-8"))
    about = found["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        f"## {found['bench']}",
        f"{about['date']}, commit {about['commit']}, {about['machine']['cpu']} with {about['machine']['cores']} cores"
        f" (load {about['machine']['load']:.1f} at the end). {versions}.",
        f"`{about['environment']}`",
    ]
    for title, text in found["tables"].items():
        lines += [f"**{title}**", text]
    return "\n\n".join(lines)


def summarize(folder: Path = FOLDER) -> Path:
    parts = [section(path) for path in sorted(folder.glob("*.json"))]
    intro = (
        "# Measured\n\nWritten by `make bench`; what is measured, and how, is told at the top of each file in bench/."
    )
    path = folder / "summary.md"
    path.write_text("\n\n".join([intro, *parts]) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    print(f"written to {summarize()}")
