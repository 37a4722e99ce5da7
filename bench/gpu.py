"""What the kernels and the runner do on a GPU: one command, one table, one JSON, in eight minutes at most.

Nothing is fetched and no weights are read: models are random, in the shapes of Llama-3.1-8B and of the demo model.
Where there is no GPU it says so and ends well. `--smoke` runs the same code on CPU tensors under Triton's interpreter,
in shapes so small that its figures mean nothing. Only torch, triton, numpy, the kernels and those modules of specserve
that need no other package are imported. Each stage ends when its share of the time is used, and says what it left out.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gpu_frame import Bench, Line

ROOT = Path(__file__).resolve().parents[1]


def targets(bench: Bench) -> list[tuple[str, str, float | None]]:
    """What was aimed at, beside what was found; only for the large model, and only where it was measured."""

    def found(part: str, case: str) -> Line | None:
        return next((line for line in bench.lines if line.part == part and line.case.startswith(case)), None)

    attended, step = found("attention", "fast, 1 x 8192, 1 rows"), found("step", "8b fast, 1 x 1024, 1 rows")
    eight = found("step", "8b fast, 1 x 1024, 8 rows")
    floor = None if step is None or step.value is None else 100 / step.value
    ratio = None if step is None or eight is None or not step.ms or not eight.ms else eight.ms / step.ms
    return [
        (
            "decode attention at 8k context, % of copy bandwidth",
            "at least 80",
            None if attended is None else attended.value,
        ),
        ("8B bf16 step at batch 1, times weights and KV by bandwidth", "at most 1.25", floor),
        ("8 rows, times one row", "at most 1.05", ratio),
        ("compiling, s", "at most 90", None if bench.device.type != "cuda" else bench.compiled),
    ]


def measure(bench: Bench) -> None:
    """Every stage, for the first model all of them."""
    import gpu_kernels
    import gpu_steps

    from specserve.models.decoder import DecoderConfig

    gpu_kernels.bandwidth(bench)
    gpu_kernels.against_reference(bench)
    fast, exact = gpu_kernels.NUMERICS["fast"], gpu_kernels.NUMERICS["exact"]
    for number, (name, raw) in enumerate(bench.size.models.items()):
        config = DecoderConfig.from_dict(raw)
        if number == 0:
            gpu_kernels.attention(bench, config)
            gpu_kernels.flex_attention(bench, config)
        print(f"{name}: making random weights", flush=True)
        decoder = gpu_steps.random_decoder(bench, config, fast)
        if number == 0:
            gpu_kernels.gemms(bench, decoder)
        tokens = gpu_steps.pool_tokens(bench, config)
        runner = gpu_steps.make_runner(bench, decoder, tokens)
        gpu_steps.end_to_end(bench, name, runner)
        chosen = list(gpu_steps.cases(bench, tokens))
        gpu_steps.steps(bench, f"{name} fast", runner, chosen)
        del runner
        gc.collect()  # its pool makes room for the next one's
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        decoder = copy.copy(decoder)  # the same weights
        decoder.ops = exact
        few = [case for case in chosen if case[1] == bench.size.batches[0] and case[2] in bench.size.nodes[:3]]
        gpu_steps.steps(bench, f"{name} exact", gpu_steps.make_runner(bench, decoder, tokens), few)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes under Triton's interpreter: code, no figures")
    chosen = parser.parse_args()
    if not chosen.smoke and not torch.cuda.is_available():
        print(f"There is no GPU here (torch {torch.__version__} finds no CUDA device): nothing was measured.")
        return
    if chosen.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    sys.path[:0] = [
        str(folder) for folder in (ROOT, ROOT / "kernels", ROOT / "bench")
    ]  # a bare machine installs nothing
    from gpu_frame import FULL, SMOKE, Bench

    device = torch.device("cpu" if chosen.smoke else "cuda")
    bench = Bench(SMOKE if chosen.smoke else FULL, device)
    try:
        with torch.inference_mode():
            measure(bench)
    finally:
        report(bench, "gpu_smoke" if chosen.smoke else "gpu")


def report(bench: Bench, name: str) -> None:
    """What was measured so far, whatever ended it."""
    from gpu_frame import COLUMNS, SEED
    from results import table, write

    where = "smoke: Triton's interpreter on CPU tensors, no figure means anything"
    if bench.device.type == "cuda":
        where = f"{torch.cuda.get_device_name(bench.device)}, torch {torch.__version__}"
    rows = [tuple(getattr(line, column) for column in COLUMNS) for line in bench.lines]
    tables = {"Measured": table(COLUMNS, rows), "Targets": table(("target", "aim", "found"), targets(bench))}
    record = {
        "device": where,
        "compiling_s": bench.compiled,
        "lines": [dict(zip(COLUMNS, row, strict=True)) for row in rows],
    }
    write(name, record, tables, where, SEED)


if __name__ == "__main__":
    main()
