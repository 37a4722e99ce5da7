"""What a run amounts to: the figures of `vllm bench serve` under its names, computed as it computes them, and ours.

Percentiles interpolate linearly. A chunk of an answer may carry several tokens when drafts are accepted, so gaps
between chunks (ITL) are bursty and time per token (TPOT) is the honest figure; tokens per chunk are told beside them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from specserve.errors import ConfigError
from specserve.events import SpeculationStats
from specserve.loadgen.drive import Run
from specserve.loadgen.targets import Outcome

SLO_NAMES = ("ttft", "tpot", "e2el")
WIDTH = 50
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def parse_goodput(items: Sequence[str]) -> dict[str, float]:
    """`ttft:200`, `tpot:20`, `e2el:…` → milliseconds by name.

    Raises:
        ConfigError: an item is of another form.
    """
    found = {}
    for item in (part for text in items for part in text.split()):
        name, _, value = item.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in SLO_NAMES or not limit > 0:
            raise ConfigError(f"--goodput {item!r} is no NAME:MILLISECONDS with a name of {', '.join(SLO_NAMES)}")
        found[name] = limit
    return found


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, 0 to 100, between neighbours linearly; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * q / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summarize(run: Run, slos: Mapping[str, float], max_concurrency: int | None, rate: float | None) -> dict[str, Any]:
    """All figures by name; names as in vLLM's result files where they mean the same."""
    done = [outcome for outcome in run.outcomes if outcome.error is None]
    num_input, num_output = sum(o.prompt_tokens for o in done), sum(o.output_tokens for o in done)
    num_chunks = sum(len(o.chunks) for o in done)
    found: dict[str, Any] = {
        "completed": len(done),
        "failed": len(run.outcomes) - len(done),
        "unsent": run.num_unsent,
        "errors": dict(Counter(o.error for o in run.outcomes if o.error is not None)),
        "max_concurrency": max_concurrency,
        "request_rate": rate,
        "duration": run.duration,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / run.duration,
        "request_goodput": num_good(done, slos) / run.duration if slos else None,
        "output_throughput": num_output / run.duration,
        "max_output_tokens_per_s": max(tokens_by_second(done, run.begin), default=0),
        "max_concurrent_requests": peak_concurrency(run.outcomes),
        "total_token_throughput": (num_input + num_output) / run.duration,
        "tokens_per_chunk": num_output / num_chunks if num_chunks else 0.0,
        "prefix_hit_rate": sum(o.cached_tokens for o in done) / num_input if num_input else 0.0,
        "num_preemptions": run.num_preemptions,
    }
    times = {
        "ttft": [o.ttft for o in done],
        "tpot": [o.tpot for o in done if o.output_tokens > 1],
        "itl": [gap for o in done for gap in o.gaps],
        "e2el": [o.e2e for o in done],
    }
    for name, values in times.items():
        found[f"mean_{name}_ms"] = 1e3 * statistics.fmean(values) if values else 0.0
        found[f"median_{name}_ms"] = 1e3 * percentile(values, 50)
        found[f"std_{name}_ms"] = 1e3 * statistics.pstdev(values) if values else 0.0
        found[f"p99_{name}_ms"] = 1e3 * percentile(values, 99)
    return found | ({} if run.speculation is None else _speculation(run.speculation))


def _speculation(stats: SpeculationStats) -> dict[str, Any]:
    """Acceptance length is tokens per step with a root row; where only vLLM's counters are known, 1 + accepted ÷
    drafts."""
    length = stats.acceptance_length
    if not stats.num_steps and stats.num_drafts:
        length = 1 + stats.num_accepted_tokens / stats.num_drafts
    drafted = stats.drafted_per_position or [stats.num_drafts] * len(stats.accepted_per_position)
    pairs = zip(stats.accepted_per_position, drafted, strict=False)
    return {
        "spec_decode_drafter": stats.drafter,
        "spec_decode_acceptance_rate": stats.num_accepted_tokens / stats.num_draft_tokens
        if stats.num_draft_tokens
        else 0.0,
        "spec_decode_acceptance_length": length,
        "spec_decode_num_drafts": stats.num_drafts,
        "spec_decode_draft_tokens": stats.num_draft_tokens,
        "spec_decode_accepted_tokens": stats.num_accepted_tokens,
        "spec_decode_per_position_acceptance_rates": [hit / tried if tried else 0.0 for hit, tried in pairs],
    }


def num_good(done: Sequence[Outcome], slos: Mapping[str, float]) -> int:
    """Requests that met every limit; an answer of one token has a time per token of 0."""
    return sum(
        all({"ttft": o.ttft, "tpot": o.tpot, "e2el": o.e2e}[name] * 1e3 <= limit for name, limit in slos.items())
        for o in done
    )


def tokens_by_second(done: Sequence[Outcome], begin: float) -> list[int]:
    """Tokens that arrived in each whole second of the run."""
    counts = Counter(int(moment - begin) for o in done for moment, _ in o.chunks)
    for second in counts:
        counts[second] = 0
    for outcome in done:
        for moment, num_tokens in outcome.chunks:
            counts[int(moment - begin)] += num_tokens
    return [counts[second] for second in range(max(counts, default=-1) + 1)]


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were in flight at one moment."""
    changes = [(o.sent_at, 1) for o in outcomes] + [(o.ended_at, -1) for o in outcomes]
    now = peak = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak


def block(found: Mapping[str, Any]) -> str:
    """The block that `vllm bench serve` prints, same labels and widths, with our rows under "Server"."""
    lines = [_title(" Serving Benchmark Result ", "=")]
    lines += [_row("Successful requests:", found["completed"]), _row("Failed requests:", found["failed"])]
    if found["unsent"]:
        lines.append(_row("Requests not sent in time:", found["unsent"]))
    if found["max_concurrency"] is not None:
        lines.append(_row("Maximum request concurrency:", found["max_concurrency"]))
    if found["request_rate"] is not None:
        lines.append(_row("Request rate configured (RPS):", float(found["request_rate"])))
    lines.append(_row("Benchmark duration (s):", found["duration"]))
    lines.append(_row("Total input tokens:", found["total_input_tokens"]))
    lines.append(_row("Total generated tokens:", found["total_output_tokens"]))
    lines.append(_row("Request throughput (req/s):", found["request_throughput"]))
    if found["request_goodput"] is not None:
        lines.append(_row("Request goodput (req/s):", found["request_goodput"]))
    lines.append(_row("Output token throughput (tok/s):", found["output_throughput"]))
    lines.append(_row("Peak output token throughput (tok/s):", float(found["max_output_tokens_per_s"])))
    lines.append(_row("Peak concurrent requests:", float(found["max_concurrent_requests"])))
    lines.append(_row("Total token throughput (tok/s):", found["total_token_throughput"]))
    for name, title in TITLES.items():
        lines.append(_title(title, "-"))
        for word in ("Mean", "Median", "P99"):
            lines.append(_row(f"{word} {name.upper()} (ms):", found[f"{word.lower()}_{name}_ms"]))
    return "\n".join([*lines, *_server_rows(found), *_speculation_rows(found), "=" * WIDTH])


def _server_rows(found: Mapping[str, Any]) -> list[str]:
    rows = [_title("Server", "-"), _row("Tokens per chunk:", found["tokens_per_chunk"])]
    rows.append(_row("Prefix hit rate (%):", 100.0 * found["prefix_hit_rate"]))
    if found["num_preemptions"] is not None:
        rows.append(_row("Preemptions:", found["num_preemptions"]))
    return rows


def _speculation_rows(found: Mapping[str, Any]) -> list[str]:
    if "spec_decode_num_drafts" not in found:
        return []
    rows = [
        _title("Speculative Decoding", "-"),
        _row("Acceptance rate (%):", 100.0 * found["spec_decode_acceptance_rate"]),
        _row("Acceptance length:", found["spec_decode_acceptance_length"]),
        _row("Drafts:", found["spec_decode_num_drafts"]),
        _row("Draft tokens:", found["spec_decode_draft_tokens"]),
        _row("Accepted tokens:", found["spec_decode_accepted_tokens"]),
    ]
    rates = found["spec_decode_per_position_acceptance_rates"]
    if rates:
        rows.append("Per-position acceptance (%):")
    return rows + [_row(f"  Position {i}:", 100.0 * rate) for i, rate in enumerate(rates)]


def _title(text: str, fill: str) -> str:
    return f"{text:{fill}^{WIDTH}}"


def _row(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"
