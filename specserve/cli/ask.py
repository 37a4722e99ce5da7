"""`specserve generate` and `specserve chat`: one prompt, or a conversation, on an engine in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specserve.cli import options
from specserve.cli.pull import progress_bar
from specserve.config import SpeculationConfig
from specserve.errors import InvalidRequest
from specserve.events import Delta, Finished, SpeculationStats, Timing
from specserve.request import SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from specserve.llm import LLM, CompletionOutput, RequestOutput

Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
SPECULATION_KEYS = (
    "drafter",
    "num_steps",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "acceptance_length",
    "accepted_per_position",
    "drafted_per_position",
    "inactive_reason",
)


@options.flat
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer.")],
    sampling: options.Sampling,
    sources: options.DraftSources,
    placement: options.Placement,
    model: options.Model = "demo",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is: no chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    n: Annotated[int, typer.Option(help="Answers to draw.")] = 1,
    temperature: Temperature = 0.0,
    speculate: options.Speculate = None,
    num_draft_tokens: options.NumDraftTokens = None,
    prediction: options.Prediction = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = None,
    kv_cache_gib: options.KvCacheGib = None,
    threads: options.Threads = None,
    kernels: options.Kernels = None,
) -> None:
    """Answer one prompt, printing its tokens as they come."""
    params = sampling.params(temperature, n)
    expected = options.predicted_text(prediction)
    llm = _load(
        model, {"drafter": speculate, "num_draft_tokens": num_draft_tokens, **sources.given()},
        dtype=dtype, quantization=quantization, max_model_len=max_model_len, page_size=block_size,
        kv_cache_gib=kv_cache_gib, threads=threads, kernels=kernels, **placement.given(),
    )  # fmt: skip
    tokenizer = llm.built.tokenizer
    ids = tokenizer.encode(prompt) if raw else tokenizer.encode_chat([{"role": "user", "content": prompt}])
    speculation = SpeculationParams(prediction=tuple(tokenizer.encode_prediction(expected)))
    if as_json:
        print(json.dumps(answer_json(llm.generate([ids], params, speculation=speculation)[0]), ensure_ascii=False))
    elif n == 1:
        _stream(llm, ids, params, speculation)
    else:
        for choice in llm.generate([ids], params, speculation=speculation)[0].outputs:
            print(f"[{choice.index}] {choice.text}")


@options.flat
def chat(
    sampling: options.Sampling,
    sources: options.DraftSources,
    placement: options.Placement,
    model: options.Model = "demo",
    temperature: Temperature = 0.7,
    speculate: options.Speculate = None,
    num_draft_tokens: options.NumDraftTokens = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = None,
    kv_cache_gib: options.KvCacheGib = None,
    threads: options.Threads = None,
    kernels: options.Kernels = None,
) -> None:
    """Talk to a model; Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    params = sampling.params(temperature)
    llm = _load(
        model, {"drafter": speculate, "num_draft_tokens": num_draft_tokens, **sources.given()},
        dtype=dtype, quantization=quantization, max_model_len=max_model_len, page_size=block_size,
        kv_cache_gib=kv_cache_gib, threads=threads, kernels=kernels, **placement.given(),
    )  # fmt: skip
    history: list[dict[str, str]] = []
    while (said := _ask_user()) is not None:
        if said.strip():
            _take_turn(llm, history, said, params)


def _ask_user() -> str | None:
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None


def _take_turn(llm: LLM, history: list[dict[str, str]], said: str, params: SamplingParams) -> None:
    """Answer, and remember both sides; a turn that is refused is forgotten, so that the next one may fit."""
    history.append({"role": "user", "content": said})
    try:
        answer = _stream(llm, llm.built.tokenizer.encode_chat(history), params)
    except InvalidRequest as error:
        history.pop()
        print(f"specserve: {error.message}", file=sys.stderr)
    else:
        history.append({"role": "assistant", "content": answer})


def _stream(llm: LLM, ids: Sequence[int], params: SamplingParams, speculation: SpeculationParams | None = None) -> str:
    """Print an answer token by token, then a line about it on stderr; Ctrl-C cuts it short. Returns its text."""
    pieces: list[str] = []
    end: Finished | None = None
    events = llm.stream(ids, params, speculation=speculation)
    try:
        for event in events:
            text = ""
            if isinstance(event, Delta):
                text = "".join(token.text for token in event.tokens)
            elif isinstance(event, Finished):
                end, text = event, event.tail_text
            pieces.append(text)
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print()
    summary = "stopped" if end is None else told(end.usage.completion_tokens, end.timing, end.speculation)
    print(f"[{summary}]", file=sys.stderr)
    return "".join(pieces)


def told(num_tokens: int, timing: Timing, stats: SpeculationStats) -> str:
    """An answer's numbers on one line."""
    first = f", {timing.ttft_ms:.0f} ms to first token" if timing.ttft_ms is not None else ""
    each = f", {timing.tpot_ms:.1f} ms per token" if timing.tpot_ms is not None else ""
    return f"{num_tokens} tokens{first}{each}, acceptance length {stats.acceptance_length:.2f} ({stats.drafter})"


def answer_json(output: RequestOutput) -> dict[str, Any]:
    """The object that `--json` prints: choice 0, and all of them under `choices` if there are several."""
    choices = output.outputs
    found = _choice_json(choices[0], output.seed)
    if len(choices) > 1:
        found["choices"] = [{"index": c.index, **_choice_json(c, output.seed)} for c in choices]
    return found


def _choice_json(choice: CompletionOutput, seed: int | None) -> dict[str, Any]:
    usage, stats, timing = choice.metrics.usage, choice.metrics.speculation, choice.metrics.timing
    return {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "seed": seed,
        "usage": {name: getattr(usage, name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")},
        "speculation": {name: getattr(stats, name) for name in SPECULATION_KEYS},
        "timing": {name: getattr(timing, name) for name in ("queue_ms", "ttft_ms", "tpot_ms", "e2e_ms")},
    }


def _load(model: str, speculation_options: dict[str, Any], **engine: Any) -> LLM:
    """An engine in this process; the options are judged before anything is fetched.

    Raises:
        SpecserveError: an option is refused, or the model cannot be had or used.
    """
    speculation = SpeculationConfig(**options.given(**speculation_options))
    options.engine_config(model=model, **engine)
    from specserve.llm import LLM
    from specserve.models.hub import resolve_model

    with progress_bar() as progress:
        resolve_model(model, progress)
    return LLM(model=model, speculation=speculation, **options.given(**engine))
