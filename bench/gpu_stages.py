"""The GPU bench's stages in their order, and until when each may begin."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import cast

import gpu_attention
import gpu_checks
import gpu_kernels
import gpu_steps
from gpu_frame import Bench
from specserve_kernels import Ops

from specserve.models.decoder import Decoder, DecoderConfig

# Shares of the whole time: the checks of all operations, attention, and the part of each model.
CHECKS_UNTIL, ATTENTION_UNTIL, MODELS_UNTIL = 0.12, 0.35, (0.8, 1.0)
# Shares of a model's part: its GEMMs, then answers and steps in fast numerics, then in exact ones.
GEMMS_UNTIL, FAST_UNTIL, EXACT_UNTIL = 0.15, (0.3, 0.7), (0.85, 1.0)


def measure(bench: Bench) -> None:
    """Every stage, for the first model all of them."""
    gpu_kernels.bandwidth(bench)
    gpu_checks.against_reference(bench, CHECKS_UNTIL)
    configs = {name: DecoderConfig.from_dict(raw) for name, raw in bench.size.models.items()}
    gpu_attention.attention(bench, next(iter(configs.values())), ATTENTION_UNTIL)
    begin = ATTENTION_UNTIL
    for (name, config), end in zip(configs.items(), MODELS_UNTIL, strict=False):
        bench.attempt("model", name, end, partial(_model, bench, name, config, begin, end))
        begin = end


def _model(bench: Bench, name: str, config: DecoderConfig, begin: float, end: float) -> None:
    def until(share: float) -> float:
        return begin + share * (end - begin)

    print(f"{name}: making random weights", flush=True)
    decoder = gpu_steps.random_decoder(bench, config, gpu_kernels.NUMERICS["fast"])
    if name == next(iter(bench.size.models)):
        gpu_kernels.gemms(bench, decoder, until(GEMMS_UNTIL))
    cases = list(gpu_steps.cases(bench))
    _runner(bench, f"{name} fast", decoder, cases, *map(until, FAST_UNTIL))
    decoder = copy.copy(decoder)  # the same weights
    decoder.ops = cast(Ops, gpu_kernels.NUMERICS["exact"])
    few = [case for case in cases if case[1] == bench.size.batches[0] and case[2] in bench.size.nodes[:3]]
    _runner(bench, f"{name} exact", decoder, few, *map(until, EXACT_UNTIL))


def _runner(
    bench: Bench,
    label: str,
    decoder: Decoder,
    cases: Sequence[tuple[int, int, int]],
    answers_until: float,
    steps_until: float,
) -> None:
    """A runner of its own, whose pool is gone when it ends."""
    runner = gpu_steps.make_runner(bench, decoder, gpu_steps.pool_tokens(bench, decoder.config))
    answers = partial(gpu_steps.end_to_end, bench, label, runner, answers_until)
    bench.attempt("end to end", label, answers_until, answers)
    gpu_steps.steps(bench, label, runner, cases, steps_until)
