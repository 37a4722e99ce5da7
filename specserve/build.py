"""The composition root: from a configuration to an engine. The only importer of specserve_drafts.

Everything that depends on the machine (free memory, CPU, kernels) is settled here, once, and reported in the
start-up lines, so that an engine's environment can be read from its log.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import specserve_kernels
import torch
from specserve_drafts import MODEL_FREE, draft_footprint, head_lines, make_auto, make_drafter

from specserve import sweep
from specserve.config import GIB, SAMPLING_DRAFTERS, CacheConfig, EngineConfig, ModelLimits, SpeculationConfig
from specserve.controller import Controller
from specserve.costs import StepCosts
from specserve.engine import Engine
from specserve.errors import ConfigError
from specserve.forward import Forward
from specserve.grammar import GrammarCompiler
from specserve.models.decoder import Decoder, DecoderConfig
from specserve.models.hub import resolve_model
from specserve.models.weights import load_decoder
from specserve.proposal import Drafter, DraftRow
from specserve.runner import CpuRunner, Runner
from specserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specserve_kernels import Ops

    from specserve.gpu_runner import GpuRunner

    AnyRunner = CpuRunner | GpuRunner

Progress = Callable[[str, int, int], None]

DEFAULT_KV_CACHE_GIB = 4.0
DEFAULT_KV_CACHE_SHARE = 0.25
WARM_NODES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An engine and what its doors need beside it."""

    engine: Engine
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    model_name: str
    folder: Path
    environment: str
    startup_lines: list[str]


def build(config: EngineConfig, progress: Progress | None = None, clock: Callable[[], float] = time.monotonic) -> Built:
    """Load the model and make an engine. All that it decides by time it reads from `clock`, in seconds.

    Raises:
        ModelNotFound, ModelError, WeightsError: the model cannot be had or used.
        ConfigError: an option does not fit the model or the machine; the message has both numbers.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    config = settle_device(config)
    folder = resolve_model(config.model, progress)
    tokenizer = Tokenizer(folder)
    ops, decoder = load_target(config, folder)
    config, memory = share_memory(config, decoder)
    config = resolve(config, decoder.config, decoder.dtype.itemsize, decoder.fingerprint)
    limits = limits_of(config, decoder, tokenizer)
    runner = make_runner(config, decoder, ops, folder)
    drafters = make_drafters(config.speculation, runner, clock)
    if not isinstance(runner, CpuRunner):
        warm_up(runner, drafters)
    limits = replace(limits, drafters=("off", *drafters))
    controller = Controller(config.speculation, step_costs(config, limits, runner, tokenizer))
    launch = None if isinstance(runner, CpuRunner) else runner.launch
    engine = Engine(config, limits, runner, ops, tokenizer, drafters, controller, clock, launch)
    environment = describe_environment(config, decoder)
    lines = startup_lines(config, limits, runner, controller) + head_lines(drafters, tokenizer.encode)
    return Built(
        engine=engine,
        tokenizer=tokenizer,
        grammars=grammar_compiler(folder, limits),
        model_name=config.served_model_name or config.model,
        folder=folder,
        environment=environment,
        startup_lines=[environment, *memory, *lines],
    )


def limits_of(config: EngineConfig, decoder: Decoder, tokenizer: Tokenizer) -> ModelLimits:
    """What a resolved configuration lets a request ask for."""
    cache = config.cache
    assert cache.num_pages is not None and config.max_model_len is not None
    return ModelLimits(
        vocab_size=decoder.config.vocab_size,
        max_model_len=config.max_model_len,
        pool_tokens=cache.num_pages * cache.page_size,
        page_size=cache.page_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        eos_token_ids=tokenizer.eos_token_ids,
    )


def settle_device(config: EngineConfig) -> EngineConfig:
    """With `auto` decided: a GPU if there is one."""
    if config.device != "auto":
        return config
    return replace(config, device="cuda" if torch.cuda.is_available() else "cpu")


def load_target(config: EngineConfig, folder: Path) -> tuple[Ops, Decoder]:
    """The operations, and the model in their layout, where they run."""
    if config.device == "cpu":
        ops = specserve_kernels.load(config.kernels)
        return ops, load_decoder(folder, ops, config.dtype, config.quantization)
    from specserve import gpu_build

    device, ops = gpu_build.device_of(config), gpu_build.gpu_ops(config)
    return ops, load_decoder(folder, ops, config.dtype, config.quantization, device)


def share_memory(config: EngineConfig, decoder: Decoder) -> tuple[EngineConfig, list[str]]:
    """On a GPU whose pool has no size yet: with the pages that memory leaves, and the line that tells the shares."""
    cache, model = config.cache, decoder.config
    if config.device == "cpu" or cache.num_pages is not None or cache.kv_cache_gib is not None:
        return config, []
    from specserve import gpu_build

    itemsize = decoder.dtype.itemsize
    drafts = draft_footprint(config, model, itemsize, decoder.fingerprint)
    page_bytes = (kv_bytes_per_token(model, itemsize) + drafts.per_token) * cache.page_size
    max_model_len = config.max_model_len or model.max_position_embeddings
    plan = gpu_build.memory_plan(config, decoder, max_model_len, page_bytes, drafts.fixed)
    return replace(config, cache=replace(cache, num_pages=plan.num_pages)), [plan.line]


def kv_bytes_per_token(model: DecoderConfig, itemsize: int) -> int:
    """Of the target's own layers."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * itemsize


def make_runner(config: EngineConfig, decoder: Decoder, ops: Ops, folder: Path) -> AnyRunner:
    """The runner of a resolved configuration."""
    cache = config.cache
    assert cache.num_pages is not None and config.max_model_len is not None
    if config.device == "cpu":
        return CpuRunner(decoder, ops, cache.num_pages, cache.page_size, folder)
    from specserve import gpu_build

    return gpu_build.make_runner(config, decoder, cache.num_pages, config.max_model_len, folder)


def warm_up(runner: GpuRunner, drafters: Mapping[str, Drafter]) -> None:
    """Capture and compile what the first steps run: the target's, and trees of the drafters with forwards of their own.

    Trees are grown in pages that are nobody's yet, below a root that comes first in its sequence: no slot is read that
    was not written.
    """
    runner.warm_up()
    num_pages = min(-(-(1 + WARM_NODES) // runner.page_size), runner.num_pages)
    cap = min(WARM_NODES, num_pages * runner.page_size - 1)
    row = DraftRow("warm-up", (0,), 1, 0, seed=0, choice=0, temperature=0.0, salt="", pages=range(num_pages))
    for name in SAMPLING_DRAFTERS:
        if name in drafters and cap > 0:
            for temperature in (0.0, 1.0):
                drafters[name].propose([row._replace(temperature=temperature)], [cap])
            drafters[name].stop(row)


def grammar_compiler(folder: Path, limits: ModelLimits) -> GrammarCompiler:
    """For the model's own tokens."""
    tokens = (folder / "tokenizer.json").read_text(encoding="utf-8")
    return GrammarCompiler(tokens, limits.vocab_size, limits.eos_token_ids)


def step_costs(config: EngineConfig, limits: ModelLimits, runner: AnyRunner, tokenizer: Tokenizer) -> StepCosts | None:
    """What steps cost, measured now, if the controller is to choose draft lengths by it."""
    if config.speculation.drafter == "off" or config.speculation.num_draft_tokens is not None:
        return None
    plain = replace(
        config,
        debug=False,
        cache=replace(config.cache, enable_prefix_caching=False),
        speculation=SpeculationConfig(drafter="off"),
    )
    limits = replace(limits, drafters=("off", sweep.DRAFTER))

    def make_engine(timed: Runner, drafters: Mapping[str, Drafter]) -> Engine:
        return Engine(plain, limits, timed, runner.ops, tokenizer, drafters, Controller(plain.speculation))

    return sweep.measure(runner, make_engine, limits)


def make_drafters(
    config: SpeculationConfig, forward: Forward | None, clock: Callable[[], float] = time.monotonic
) -> dict[str, Drafter]:
    """The drafters that this engine offers, by name: those that cost nothing until used, and what is configured.

    Raises:
        ConfigError, ModelError, WeightsError: the configured drafter cannot be had; the message says why.
    """
    drafters = {name: make_drafter(name, config, forward) for name in MODEL_FREE}
    if forward is None:
        return drafters | {"auto": make_auto(drafters, forward, clock)}
    configured = {
        "early_exit": config.early_exit_layers is not None,
        "draft_model": config.draft_model is not None,
        "eagle": config.eagle_head is not None,
    }
    for name, given in configured.items():
        if given or config.drafter == name:
            drafters[name] = make_drafter(name, config, forward)
    if config.drafter == "auto" and "eagle" not in drafters:
        with suppress(ConfigError):  # there is no head for this model; auto does without
            drafters["eagle"] = make_drafter("eagle", config, forward)
    return drafters | {"auto": make_auto(drafters, forward, clock)}


def resolve(config: EngineConfig, model: DecoderConfig, kv_itemsize: int, fingerprint: str = "") -> EngineConfig:
    """A new configuration in which every size is a number that fits the model and the machine.

    `fingerprint`: the model's, which tells whether a head comes with specserve.
    """
    context = model.max_position_embeddings
    max_model_len = config.max_model_len or context
    if max_model_len > context:
        raise ConfigError(f"max_model_len is {max_model_len}; the model's context is {context} tokens")
    num_pages = config.cache.num_pages
    if num_pages is None:
        drafts = draft_footprint(config, model, kv_itemsize, fingerprint)
        num_pages = _pages_in_memory(config, model, max_model_len, kv_itemsize, drafts.per_token)
    return replace(config, max_model_len=max_model_len, cache=replace(config.cache, num_pages=num_pages))


def _pages_in_memory(
    config: EngineConfig, model: DecoderConfig, max_model_len: int, kv_itemsize: int, draft_bytes: int
) -> int:
    """How many fit; `draft_bytes` are what drafters add to each token."""
    cache: CacheConfig = config.cache
    gib = cache.kv_cache_gib
    if gib is None:
        gib = min(DEFAULT_KV_CACHE_GIB, DEFAULT_KV_CACHE_SHARE * _free_memory() / GIB)
    page_bytes = (kv_bytes_per_token(model, kv_itemsize) + draft_bytes) * cache.page_size
    num_pages = int(gib * GIB // page_bytes)
    need = -(-max_model_len // cache.page_size)
    if num_pages < need:
        raise ConfigError(
            f"kv_cache_gib {gib:.3f} holds {num_pages * cache.page_size} tokens; one context of {max_model_len} tokens"
            f" needs {need * page_bytes / GIB:.3f} GiB; raise kv_cache_gib or lower max_model_len"
        )
    return num_pages


def _free_memory() -> int:
    """Bytes that can be taken without swapping; where the system does not say, what is physically free."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe_environment(config: EngineConfig, decoder: Decoder) -> str:
    """The environment inside which bits are promised."""
    kernels = specserve_kernels.describe(config.kernels if config.device == "cpu" else "triton")
    dtype = str(decoder.dtype).removeprefix("torch.")
    weights = dtype if config.quantization is None else f"{config.quantization} (all else {dtype})"
    return (
        f"environment: numerics {config.numerics}, weights {weights},"
        f" kernels {kernels},"
        f" threads {torch.get_num_threads()}, cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()},"
        f" torch {torch.__version__}"
        + ("" if config.device == "cpu" else f", gpu {torch.cuda.get_device_name(decoder.device)}")
    )


def cache_line(limits: ModelLimits, runner: AnyRunner) -> str:
    """`KV cache: N tokens in M pages of P (X MiB); maximum concurrency at L tokens per request: Y`."""
    mib = runner.kv.numel() * runner.kv.element_size() / 1024**2
    pages = limits.pool_tokens // limits.page_size
    return (
        f"KV cache: {limits.pool_tokens} tokens in {pages} pages of {limits.page_size} ({mib:.0f} MiB);"
        f" maximum concurrency at {limits.max_model_len} tokens per request:"
        f" {limits.pool_tokens / limits.max_model_len:.1f}"
    )


def startup_lines(config: EngineConfig, limits: ModelLimits, runner: AnyRunner, controller: Controller) -> list[str]:
    """What was settled: the pool, speculation, and the costs by which draft lengths are chosen, if they are."""
    lines, costs = [cache_line(limits, runner), speculation_line(config, limits)], controller.costs
    if costs is not None:
        told = ", ".join(f"{count} rows {1e3 * costs.rows(count):.1f} ms" for count in (1, 16, 32, 64))
        lines.append(f"step costs: {told}; a prompt row {1e6 * costs.row:.0f} us")
    return lines


def speculation_line(config: EngineConfig, limits: ModelLimits) -> str:
    """Loud about whether anything will be drafted, and by whom."""
    speculation = config.speculation
    if speculation.drafter == "off" or speculation.num_draft_tokens == 0:
        return "speculation: off (requests may ask for a drafter)"
    who = speculation.drafter
    if who == "auto":
        head = "an EAGLE head" if "eagle" in limits.drafters else "no EAGLE head for this model"
        who = f"auto (suffix, recycling, predictions; {head})"
    count = speculation.num_draft_tokens
    how_many = "as many draft tokens as pay" if count is None else f"up to {count} draft tokens"
    return f"speculation: {who}, {how_many} a step"
