"""What an engine is made of, as frozen records that validate themselves.

Options arrive flat (`LLM(model="demo", max_num_seqs=8)`, `serve --max-num-seqs 8`) and are sorted into groups
by `from_options`; an unknown name is an error that names the nearest known one. `resolve` never mutates: it
returns a new record with every "unset" replaced by a number.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from specserve.errors import ConfigError

DrafterName = Literal["off", "auto", "ngram", "suffix", "recycling", "prediction", "draft_model", "early_exit", "eagle"]
DRAFTER_NAMES: tuple[str, ...] = get_args(DrafterName)
SAMPLING_DRAFTERS = ("draft_model", "early_exit", "eagle")
DTYPES = ("auto", "bfloat16", "float32")
QUANTIZATIONS = ("int8",)
KERNEL_BACKENDS = ("auto", "native", "torch", "reference")
DEVICES = ("cpu", "cuda", "auto")
GIB = 1024**3


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_types(record: Any, *, integers: tuple[str, ...] = (), numbers: tuple[str, ...] = ()) -> None:
    """Options may come from Python, where nothing checks them; None means unset."""
    for name in (*integers, *numbers):
        value = getattr(record, name)
        fits = isinstance(value, int) or (name in numbers and isinstance(value, float))
        right = value is None or (fits and not isinstance(value, bool))
        kind = "a number" if name in numbers else "an integer"
        _require(right, f"{name} is {value!r}; it must be {kind}")


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or the list of known names when nothing is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(names)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV pool. `kv_cache_gib` unset = min(4, 25 % of what is free), on a GPU the rest; `num_pages` rules."""

    page_size: int = 16
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    num_pages: int | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _require_types(self, integers=("page_size", "num_pages"), numbers=("kv_cache_gib", "gpu_memory_utilization"))
        _require(self.page_size >= 1, f"page_size is {self.page_size}; it must be at least 1 token")
        gib, share, num_pages = self.kv_cache_gib, self.gpu_memory_utilization, self.num_pages
        _require(gib is None or gib > 0, f"kv_cache_gib is {gib}; it must be more than 0")
        _require(0 < share <= 1, f"gpu_memory_utilization is {share}; it must be more than 0 and at most 1")
        _require(num_pages is None or num_pages >= 1, f"num_pages is {num_pages}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the queue before it."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 32
    min_chunk: int = 16
    max_num_queued_requests: int = 1024
    max_num_queued_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        _require_types(self, integers=tuple(item.name for item in fields(self)))
        for item in fields(self):
            value = getattr(self, item.name)
            _require(value >= 1, f"{item.name} is {value}; it must be at least 1")
        need = self.max_num_seqs + self.min_chunk
        _require(
            self.max_num_batched_tokens >= need,
            f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs + min_chunk"
            f" = {need}, so that a full batch still lets a prompt advance",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Which drafter guesses, and how far. `num_draft_tokens` counts nodes; the root comes on top.

    `num_draft_tokens` unset = the controller decides, step by step. `draft_model`: folder of a decoder with the
    target's tokens. `eagle_head`: folder of an EAGLE head; unset = the one that comes with specserve, if it was
    trained for this very target. `early_exit_layers`: how many of the target's layers draft; unset = two thirds.
    `draft_window`: how many of a prompt's last tokens a model drafter reads.
    """

    drafter: str = "auto"
    num_draft_tokens: int | None = None
    ngram_min: int = 1
    ngram_max: int = 4
    draft_model: str | None = None
    eagle_head: str | None = None
    early_exit_layers: int | None = None
    draft_window: int = 2048
    verification: str = "coupled"

    def __post_init__(self) -> None:
        _require_types(
            self, integers=("num_draft_tokens", "ngram_min", "ngram_max", "early_exit_layers", "draft_window")
        )
        _require(
            self.drafter in DRAFTER_NAMES,
            f"drafter is {self.drafter!r}. {nearest(self.drafter, DRAFTER_NAMES)}",
        )
        count = self.num_draft_tokens
        _require(
            count is None or 0 <= count <= MAX_NUM_DRAFT_TOKENS,
            f"num_draft_tokens is {count}; allowed: 0 to {MAX_NUM_DRAFT_TOKENS}",
        )
        _require(
            self.drafter != "draft_model" or bool(self.draft_model),
            "drafter is 'draft_model' and no draft_model is given; name a folder, a .gguf file or a hub id",
        )
        for name in ("early_exit_layers", "draft_window"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name} is {value}; it must be at least 1")
        _require(
            self.verification in ("coupled", "block"),
            f"verification is {self.verification!r}; allowed: coupled, block",
        )
        _require(
            self.verification == "coupled" or self.drafter in SAMPLING_DRAFTERS,
            "verification is 'block', which needs a drafter that samples from a distribution of its own:"
            f" {', '.join(SAMPLING_DRAFTERS)}; drafter is {self.drafter!r}, and what it guesses is verified coupled",
        )
        _require(
            1 <= self.ngram_min <= self.ngram_max,
            f"ngram_min {self.ngram_min} and ngram_max {self.ngram_max} must satisfy 1 <= min <= max",
        )


MAX_NUM_DRAFT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from. `served_model_name` unset = the model's own name.

    `quantization` is the format that matrices are brought to at load; `dtype` stays that of all else (norms, KV).
    `device` auto = a GPU if there is one. `numerics` fast = a GPU's library products and shared blocks of attention.
    """

    model: str = "demo"
    served_model_name: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    numerics: str = "exact"
    max_model_len: int | None = None
    device: str = "cpu"
    kernels: str = "auto"
    threads: int | None = None
    debug: bool = False
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        _require(bool(self.model), "model is empty; give a name, a folder, a .gguf file or a hub id")
        numerics = ("exact",) if self.device == "cpu" else ("exact", "fast")
        lists = {"dtype": DTYPES, "quantization": QUANTIZATIONS, "device": DEVICES, "numerics": numerics}
        for name, allowed in lists.items():
            value = getattr(self, name)
            unset = name == "quantization" and value is None
            _require(unset or value in allowed, f"{name} is {value!r}; allowed: {', '.join(allowed)}")
        known = KERNEL_BACKENDS
        _require(self.kernels in known, f"kernels is {self.kernels!r}. {nearest(self.kernels, known)}")
        _require_types(self, integers=("max_model_len", "threads"))
        for name in ("max_model_len", "threads"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name} is {value}; it must be at least 1")

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Sort flat options into their groups.

        Raises:
            ConfigError: an option is unknown (names the nearest known one) or its value is refused.
        """
        groups: dict[str, type[Any]] = {
            "cache": CacheConfig,
            "scheduler": SchedulerConfig,
            "speculation": SpeculationConfig,
        }
        owner = {f.name: group for group, record in groups.items() for f in fields(record)}
        top = {f.name for f in fields(cls)}
        known = top | set(owner)
        nested: dict[str, dict[str, Any]] = {}
        flat: dict[str, Any] = {}
        for name, value in options.items():
            _require(name in known, f"unknown option {name!r}. {nearest(name, known)}")
            if name in top:
                flat[name] = value
            else:
                nested.setdefault(owner[name], {})[name] = value
        for group, values in nested.items():
            base = flat.get(group, groups[group]())
            flat[group] = replace(base, **values)
        return cls(**flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the doors need to know of a loaded engine to refuse a request: all counts in tokens or ids."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int
    page_size: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    drafters: tuple[str, ...] = DRAFTER_NAMES
