"""What the kernels and the runner do on a GPU: one command, one table, one JSON, in eight minutes at most.

Nothing is fetched and no weights are read: models are random, in the shapes of Llama-3.1-8B and of the demo model.
Where there is no GPU it says so and ends well. `--smoke` runs the same code on CPU tensors under Triton's interpreter,
in shapes so small that its figures mean nothing. Only torch, triton, numpy, the kernels and those modules of specserve
that need no other package are imported. Each stage begins only while its budgets last, of the eight minutes and of the
90 seconds for compilers; what is left out is named. The command ends with 1 if a result is not what it must be.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gpu_frame import Bench, Line

ROOT = Path(__file__).resolve().parents[1]


def targets(bench: Bench) -> list[tuple[str, str, float | None, str]]:
    """What was aimed at, beside what was found; only for the large model, and only where it was measured."""

    def found(part: str, case: str) -> Line | None:
        return next((line for line in bench.lines if line.part == part and line.case.startswith(case)), None)

    attended, step = found("attention", "fast, 1 x 8192, 1 rows"), found("step", "8b fast, 1 x 1024, 1 rows")
    eight = found("step", "8b fast, 1 x 1024, 8 rows")
    share = None if attended is None else attended.value
    floor = None if step is None or step.value is None else 100 / step.value
    ratio = None if step is None or eight is None or not step.ms or not eight.ms else eight.ms / step.ms
    compiled, used = (bench.compiled, bench.used) if bench.device.type == "cuda" else (None, None)
    return [
        target("decode attention at 8k context, % of copy bandwidth", share, least=80),
        target("8B bf16 step at batch 1, times weights and KV by bandwidth", floor, most=1.25),
        target("8 rows, times one row", ratio, most=1.05),
        target("compiling, s", compiled, most=90),
        target("the whole command, s", used, most=480),
    ]


def target(
    name: str, found: float | None, *, least: float = 0.0, most: float = float("inf")
) -> tuple[str, str, float | None, str]:
    """Name, aim, what was found, and whether that is the aim."""
    aim = f"at least {least:g}" if least else f"at most {most:g}"
    verdict = "not measured" if found is None else "met" if least <= found <= most else "missed"
    return name, aim, found, verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes under Triton's interpreter: code, no figures")
    chosen = parser.parse_args()
    if not chosen.smoke and not torch.cuda.is_available():
        print(f"There is no GPU here (torch {torch.__version__} finds no CUDA device): nothing was measured.")
        return
    if chosen.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    # a bare machine installs nothing
    sys.path[:0] = [str(folder) for folder in (ROOT, ROOT / "kernels", ROOT / "bench")]
    from gpu_frame import FULL, SMOKE, Bench
    from gpu_stages import measure

    device = torch.device("cpu" if chosen.smoke else "cuda")
    bench = Bench(SMOKE if chosen.smoke else FULL, device)
    try:
        with torch.inference_mode():
            measure(bench)
    finally:
        report(bench, "gpu_smoke" if chosen.smoke else "gpu")
    if bench.failed:
        sys.exit(f"results that are not what they must be: {len(bench.failed)}")


def report(bench: Bench, name: str) -> None:
    """What was measured so far, whatever ended it."""
    from gpu_frame import COLUMNS, SEED
    from results import table, write

    where = "smoke: Triton's interpreter on CPU tensors, no figure means anything"
    if bench.device.type == "cuda":
        where = f"{torch.cuda.get_device_name(bench.device)}, torch {torch.__version__}"
    rows = [tuple(getattr(line, column) for column in COLUMNS) for line in bench.lines]
    aims = table(("target", "aim", "found", "verdict"), targets(bench))
    tables = {"Measured": table(COLUMNS, rows), "Targets": aims}
    record = {
        "device": where,
        "compiling_s": bench.compiled,
        "lines": [dict(zip(COLUMNS, row, strict=True)) for row in rows],
    }
    write(name, record, tables, where, SEED)


if __name__ == "__main__":
    main()
