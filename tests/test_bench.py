"""The benches: their arithmetic on figures worked out by hand, and that each command tells what it promises.

No speed is asserted; everything runs on tiny models.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import struct
import sys
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from doors.fake_engine import FakeEngine, Loaded
from doors.serving import serving
from tiny import TinyLlama
from typer.testing import CliRunner

from specserve.cli import app
from specserve.errors import ConfigError, EngineFault
from specserve.events import SpeculationStats
from specserve.loadgen import drive, plot, report, targets, workload
from specserve.loadgen.drive import Run
from specserve.loadgen.targets import Counters, GrpcTarget, OpenAiTarget, Outcome, ServerFacts
from specserve.loadgen.workload import Job
from specserve.prompts import OWN_PROMPTS, read_prompts
from specserve.provenance import provenance

BENCH = Path(__file__).resolve().parents[1] / "bench"
CATEGORIES = {"chat", "translation", "summarization", "qa", "math", "rag_code"}
PROVENANCE = {"commit", "date", "environment", "machine", "versions", "seed"}


# -- arithmetic ----------------------------------------------------------------------------------------------------


def test_percentiles_interpolate() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [report.percentile(values, q) for q in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert report.percentile(values, 99) == pytest.approx(3.97)
    assert report.percentile([7.0], 99) == 7.0 and report.percentile([], 50) == 0.0
    many = [((i * 37) % 101) / 7 for i in range(101)]
    assert report.percentile(many, 25) == pytest.approx(statistics.quantiles(many, n=4, method="inclusive")[0])


def _outcome(sent: float, times: list[tuple[float, int]], **more: Any) -> Outcome:
    outcome = Outcome(sent_at=sent, ended_at=times[-1][0] if times else sent, chunks=times, **more)
    outcome.output_tokens = sum(count for _, count in times)
    return outcome


def _run(*outcomes: Outcome, **more: Any) -> Run:
    given: dict[str, Any] = {"num_preemptions": 2, "speculation": None, "num_unsent": 0, **more}
    return Run(outcomes=outcomes, begin=10.0, duration=2.0, **given)


FAST = _outcome(10.0, [(10.1, 1), (10.2, 3), (10.5, 1)], prompt_tokens=40, cached_tokens=16)
SLOW = _outcome(10.25, [(11.25, 2), (11.75, 2)], prompt_tokens=60)
SHORT = _outcome(11.0, [(11.05, 1)], prompt_tokens=20, cached_tokens=14)
FAILED = Outcome(sent_at=10.0, ended_at=10.01, error="no")


def test_figures_of_a_run() -> None:
    found = report.summarize(_run(FAST, SLOW, SHORT, FAILED), {}, 4, None)
    assert (found["completed"], found["failed"], found["errors"]) == (3, 1, {"no": 1})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (120, 10)
    assert (found["request_throughput"], found["output_throughput"]) == (1.5, 5.0)
    assert found["total_token_throughput"] == 65.0 and found["request_goodput"] is None
    assert found["max_output_tokens_per_s"] == 5 and found["max_concurrent_requests"] == 2
    assert found["prefix_hit_rate"] == 0.25 and found["tokens_per_chunk"] == pytest.approx(10 / 6)
    assert found["median_ttft_ms"] == pytest.approx(100) and found["mean_ttft_ms"] == pytest.approx(1150 / 3)
    # per token after the first: 0.4 s / 4 and 0.5 s / 3; an answer of one token has none
    assert found["mean_tpot_ms"] == pytest.approx((100 + 500 / 3) / 2)
    assert found["mean_itl_ms"] == pytest.approx((100 + 300 + 500) / 3)
    assert found["median_e2el_ms"] == pytest.approx(500)
    assert found["num_preemptions"] == 2 and "spec_decode_num_drafts" not in found


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    slos = report.parse_goodput(["ttft:200 tpot:120", "e2el:600"])
    assert slos == {"ttft": 200.0, "tpot": 120.0, "e2el": 600.0}
    done = [FAST, SLOW, SHORT]
    assert report.num_good(done, slos) == 2
    assert report.num_good(done, {"ttft": 99.0}) == 1 and report.num_good(done, {"tpot": 99.0}) == 1
    assert report.summarize(_run(*done), slos, None, None)["request_goodput"] == 1.0
    for wrong in ("ttft", "ttft:", "ttft:-1", "itl:5", "ttft:nan"):
        with pytest.raises(ConfigError, match="NAME:MILLISECONDS"):
            report.parse_goodput([wrong])


def test_speculation_is_pooled_over_requests() -> None:
    parts = [
        SpeculationStats("ngram", 10, 20, 5, 20, 10, [4, 3, 3], [5, 5, 5]),
        SpeculationStats("ngram", 30, 30, 2, 4, 0, [0], [2]),
    ]
    found = report.summarize(_run(FAST, speculation=drive.pooled(parts)), {}, None, None)
    assert found["spec_decode_acceptance_length"] == 1.25 and found["spec_decode_drafter"] == "ngram"
    assert found["spec_decode_acceptance_rate"] == pytest.approx(10 / 24)
    assert found["spec_decode_per_position_acceptance_rates"] == [pytest.approx(4 / 7), 0.6, 0.6]
    vllm = SpeculationStats(num_drafts=4, num_draft_tokens=8, num_accepted_tokens=6, accepted_per_position=[4, 2])
    found = report.summarize(_run(FAST, speculation=vllm), {}, None, None)
    assert found["spec_decode_acceptance_length"] == 2.5
    assert found["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5]


def test_the_block_is_vllms() -> None:
    stats = SpeculationStats("ngram", 10, 20, 5, 20, 10, [4, 3], [5, 5])
    found = report.summarize(_run(FAST, SLOW, speculation=stats), {"ttft": 200.0}, 4, 2.5)
    lines = report.block(found).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50
    for line in (
        "Successful requests:                     2         ",
        "Maximum request concurrency:             4         ",
        "Request rate configured (RPS):           2.50      ",
        "Benchmark duration (s):                  2.00      ",
        "Request goodput (req/s):                 0.50      ",
        "Peak output token throughput (tok/s):    5.00      ",
        "---------------Time to First Token----------------",
        "Median TTFT (ms):                        550.00    ",
        "-----Time per Output Token (excl. 1st token)------",
        "---------------Inter-token Latency----------------",
        "P99 ITL (ms):                            496.00    ",
        "---------------Speculative Decoding---------------",
        "Acceptance length:                       2.00      ",
        "  Position 1:                            60.00     ",
        "Preemptions:                             2         ",
    ):
        assert line in lines, line


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    plot.draw(_run(FAST, SLOW, FAILED), tmp_path / "a.png")
    plot.draw(_run(FAILED), tmp_path / "none.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    length = struct.unpack(">I", data[33:37])[0]
    pixels = zlib.decompress(data[41 : 41 + length])
    assert len(pixels) == height * (1 + 3 * width)
    assert bytes(plot.LINE) in pixels and bytes(plot.INK) in pixels


# -- workloads -----------------------------------------------------------------------------------------------------


def test_poisson_arrivals_are_seeded_and_have_their_rate() -> None:
    jobs = [Job(prompt=(1,), max_tokens=1)] * 4000
    times = [job.arrival for job in workload.poisson(jobs, 8.0, seed=3)]
    assert times == [job.arrival for job in workload.poisson(jobs, 8.0, seed=3)]
    assert times != [job.arrival for job in workload.poisson(jobs, 8.0, seed=4)]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert min(gaps) > 0 and statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    # an exponential's deviation is its mean
    assert statistics.pstdev(gaps) == pytest.approx(1 / 8, rel=0.08)


def test_random_prompts_are_seeded() -> None:
    jobs = workload.random_jobs(5, 12, 7, 100, seed=1)
    assert jobs == workload.random_jobs(5, 12, 7, 100, seed=1) != workload.random_jobs(5, 12, 7, 100, seed=2)
    assert {(len(job.prompt), job.max_tokens, job.arrival) for job in jobs} == {(12, 7, 0.0)}
    assert all(0 <= token < 100 for job in jobs for token in job.prompt if isinstance(token, int))
    assert len(workload.as_text(jobs[0].prompt).split()) == 12


def test_an_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,480,10\n"
        "2023-11-16 18:17:04.2299600,30,8\n2023-11-16 18:17:05.0000000,30,0\n2023-11-16 18:18:03.9799600,7,1\n"
    )
    rows = workload.read_trace(path, 10)
    assert [(row.input_len, row.output_len) for row in rows] == [(480, 10), (30, 8), (7, 1)]
    assert [row.arrival for row in rows] == pytest.approx([0.0, 0.25, 60.0], abs=1e-5)
    assert len(workload.read_trace(path, 2)) == 2
    jobs = workload.trace_jobs(rows, 50, seed=0, speed=10)
    assert [len(job.prompt) for job in jobs] == [480, 30, 7] and jobs[2].arrival == pytest.approx(6.0)


def test_a_mooncake_trace_shares_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 1000, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 9]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    read = workload.read_trace(path, 10)
    assert [row.arrival for row in read] == [0.0, 1.0]
    first, second = (job.prompt for job in workload.trace_jobs(read, 1000, seed=0))
    assert (len(first), len(second)) == (1030, 1100)
    assert first[:1024] == second[:1024] and first[1024:1030] != second[1024:1030]


@pytest.mark.parametrize(
    "text", ["", "{}", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1", "[1]", '{"timestamp": "x"}']
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace .* (line|holds)"):
        workload.read_trace(path, 10)


def test_jobs_are_cut_to_the_server() -> None:
    jobs = [Job(prompt=(1,) * 90, max_tokens=80), Job(prompt=(1,) * 9, max_tokens=8), Job(prompt="x", max_tokens=8)]
    fitted, num_cut = workload.fit(jobs, 100)
    assert [(len(job.prompt), job.max_tokens) for job in fitted] == [(50, 50), (9, 8), (1, 8)] and num_cut == 1


def test_our_prompts() -> None:
    prompts = read_prompts(OWN_PROMPTS)
    assert {category for category, _ in prompts} == CATEGORIES
    assert all(sum(category == name for category, _ in prompts) == 8 for name in CATEGORIES)
    assert len({text for _, text in prompts}) == len(prompts) == 48


def test_a_dataset_in_spec_bench_s_form(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"question_id": 1, "category": "math", "turns": ["a", "b"]}\n\n{"prompt": "c"}\n')
    assert read_prompts(path) == [("math", "a"), ("all", "c")]
    assert [job.prompt for job in workload.dataset_jobs(["a", "c"], 3, 5)] == ["a", "c", "a"]
    path.write_text('{"turns": []}')
    with pytest.raises(ConfigError, match="line 1"):
        read_prompts(path)


# -- driving -------------------------------------------------------------------------------------------------------


class FakeTarget:
    """Answers after `wait` seconds with `max_tokens` tokens, and watches how many it answers at once."""

    def __init__(self, wait: float) -> None:
        self.wait, self.now, self.peak, self.calls = wait, 0, 0, 0

    async def facts(self) -> ServerFacts:
        return ServerFacts(model="fake")

    async def counters(self) -> Counters:
        self.calls += 1
        return Counters(num_preemptions=10 * self.calls)

    async def ask(self, job: Job, outcome: Outcome) -> None:
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            await asyncio.sleep(self.wait)
            if job.max_tokens == 13:
                raise EngineFault("thirteen")
            outcome.take(job.max_tokens)
        finally:
            self.now -= 1

    async def close(self) -> None: ...


def _drive(target: FakeTarget, jobs: list[Job], **options: Any) -> Run:
    return asyncio.run(drive.drive(target, jobs, **options))


def test_a_closed_loop_keeps_its_bound() -> None:
    target, done = FakeTarget(0.01), []
    jobs = [Job(prompt=(1,), max_tokens=13 if i == 5 else 2) for i in range(12)]
    run = _drive(target, jobs, max_concurrency=3, progress=done.append)
    assert target.peak == 3 and done == list(range(1, 13))
    assert [o.error for o in run.outcomes].count("thirteen") == 1 and run.num_preemptions == 10
    assert report.peak_concurrency(run.outcomes) <= 3 and run.num_unsent == 0


def test_an_open_loop_keeps_its_times() -> None:
    target = FakeTarget(0.0)
    jobs = [Job(prompt=(1,), max_tokens=1, arrival=at) for at in (0.2, 0.05, 0.1)]
    run = _drive(target, jobs)
    sent = [outcome.sent_at - run.begin for outcome in run.outcomes]
    assert sent == sorted(sent)
    assert all(0 <= late - due < 0.15 for late, due in zip(sent, (0.05, 0.1, 0.2), strict=True))


def test_a_run_ends_when_its_time_is_over() -> None:
    jobs = [Job(prompt=(1,), max_tokens=1)] * 2 + [Job(prompt=(1,), max_tokens=1, arrival=99.0)]
    run = _drive(FakeTarget(99.0), jobs, max_concurrency=1, max_duration=0.1)
    assert run.duration < 5 and run.num_unsent == 2 and run.outcomes[0].error == "the run's time was over"
    assert report.summarize(run, {}, 1, None)["completed"] == 0


def test_grpc_target() -> None:
    async def body() -> None:
        loaded = Loaded()
        async with serving(lambda: loaded) as client:
            await _ask_grpc(f"127.0.0.1:{client.port}", loaded.engine)

    asyncio.run(body())


async def _ask_grpc(address: str, engine: FakeEngine) -> None:
    target = GrpcTarget(address, 0.5, 7, ignore_eos=True, drafter="off")
    facts = await target.facts()
    assert (facts.model, facts.vocab_size, facts.max_len) == ("fake", 1000, 64)
    jobs = [Job(prompt=(1, 2, 3), max_tokens=4), Job(prompt="hi", max_tokens=6), Job(prompt=(5000,), max_tokens=4)]
    run = await drive.drive(target, jobs, max_concurrency=1)
    await target.close()
    assert [o.output_tokens for o in run.outcomes] == [4, 6, 0]
    assert run.outcomes[2].error is not None and "INVALID_ARGUMENT" in run.outcomes[2].error
    assert run.num_preemptions == 0 and run.speculation is not None and run.speculation.num_steps == 8
    asked = engine.submitted[0]
    assert (asked.params.temperature, asked.params.seed, asked.params.ignore_eos) == (0.5, 7, True)
    assert asked.speculation.drafter == "off" and asked.cache_salt.startswith("bench-")


METRICS = """# HELP vllm:spec_decode_num_drafts_total x
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 4.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 12.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0
vllm:num_preemptions_total{engine="0"} 1.0
"""
STREAM = (
    '{"choices": [{"index": 0, "text": "a"}]}',
    '{"choices": [{"index": 0, "text": "bc", "token_ids": [1, 2]}]}',
    '{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details":'
    ' {"cached_tokens": 4}}}',
    "[DONE]",
)


@asynccontextmanager
async def _openai_server(asked: list[tuple[str, Any]]) -> AsyncIterator[str]:
    """Answers in chunks that are cut in the middle of a line."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].split()[0])
        body = json.loads(await reader.readexactly(length)) if length else None
        path = head.split()[1]
        asked.append((path, body))
        text = METRICS if path == "/metrics" else "".join(f"data: {line}\n\n" for line in STREAM)
        wrong = body is not None and body["max_tokens"] == 13
        writer.write(f"HTTP/1.1 {'500 Oh' if wrong else '200 OK'}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for start in range(0, len(text), 50):
            part = text[start : start + 50].encode()
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


def test_openai_target() -> None:
    async def body() -> None:
        asked: list[tuple[str, Any]] = []
        async with _openai_server(asked) as url:
            target = OpenAiTarget(url, "m", 0.0, 1, ignore_eos=False)
            jobs = [Job(prompt=(1, 2), max_tokens=3), Job(prompt="hi", max_tokens=3), Job(prompt="x", max_tokens=13)]
            run = await drive.drive(target, jobs, max_concurrency=1)
        words, chat, wrong = run.outcomes
        assert (words.output_tokens, words.prompt_tokens, words.cached_tokens) == (3, 9, 4)
        assert [count for _, count in words.chunks] == [1, 2] and chat.error is None
        assert wrong.error is not None and wrong.error.startswith("/v1/chat/completions answered 500 Oh")
        paths = [path for path, _ in asked]
        assert paths == ["/metrics", "/v1/completions", "/v1/chat/completions", "/v1/chat/completions", "/metrics"]
        assert asked[1][1]["prompt"] == "year people" and asked[2][1]["messages"][0]["content"] == "hi"
        assert run.speculation is not None and run.speculation.num_drafts == 0 == run.num_preemptions

    asyncio.run(body())


def test_nobody_there_is_told() -> None:
    with pytest.raises(EngineFault, match="cannot connect"):
        asyncio.run(OpenAiTarget("127.0.0.1:1", "m", 0.0, 1, False).ask(Job(prompt="x", max_tokens=1), Outcome(0.0)))
    with pytest.raises(ConfigError, match="base-url"):
        OpenAiTarget("ftp://x", "m", 0.0, 1, False)
    counters = targets.prometheus_counters(METRICS)
    assert counters.num_preemptions == 1 and counters.speculation is not None
    assert (counters.speculation.num_accepted_tokens, counters.speculation.accepted_per_position) == (6, [4, 2])


# -- commands ------------------------------------------------------------------------------------------------------


def test_provenance_says_where_a_number_comes_from() -> None:
    found = provenance("environment: x", 5)
    assert set(found) == PROVENANCE and (found["environment"], found["seed"]) == ("environment: x", 5)
    assert {"specserve", "python", "torch", "transformers"} <= set(found["versions"])
    assert found["date"].endswith("+00:00") and found["machine"]["cores"] >= 1


def test_bench_serve_prints_the_block_and_writes_its_figures(tmp_path: Path) -> None:
    async def body() -> Any:
        loaded = Loaded()
        async with serving(lambda: loaded) as client:
            command = [
                "bench",
                "serve",
                "--port",
                str(client.port),
                "--num-prompts",
                "4",
                "--input-len",
                "6",
                "--output-len",
                "3",
            ]
            command += ["--max-concurrency", "2", "--goodput", "ttft:5000", "tpot:5000"]
            command += ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
            return await asyncio.to_thread(CliRunner().invoke, app, command)

    result = asyncio.run(body())
    assert result.exit_code == 0, result.exception
    assert "Successful requests:                     4" in result.stdout
    found = json.loads((tmp_path / "a.json").read_text())
    assert set(found["provenance"]) == PROVENANCE and found["provenance"]["environment"] == "environment: none"
    assert (found["model"], found["completed"], found["total_output_tokens"]) == ("fake", 4, 12)
    assert found["goodput"] == {"ttft": 5000.0, "tpot": 5000.0} and found["request_goodput"] > 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "t.csv", "--request-rate", "2"], "--trace brings its own"),
        (["--request-rate", "0"], "--request-rate is 0.0"),
        (["--goodput", "ttft=5"], "NAME:MILLISECONDS"),
        (["--base-url", "http://x"], "needs --model"),
    ],
)
def test_bench_serve_refuses(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert isinstance(result.exception, ConfigError) and said in result.exception.message


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The files of bench/ as they import each other; results go to a folder of the test's own."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    import results

    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    threads = torch.get_num_threads()
    yield tmp_path / "results"
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


def _script(name: str) -> ModuleType:
    import importlib

    return importlib.import_module(name)


def test_tables(scripts: Path) -> None:
    results = _script("results")
    text = results.table(("name", "ms"), [["a", 1.234567], ["b", 12345.6], ["c", None]])
    assert text.splitlines() == [
        "| name |     ms |",
        "| ---- | -----: |",
        "| a    |   1.23 |",
        "| b    | 12,346 |",
        "| c    |      – |",
    ]
    order: list[str] = []
    work = {"x": lambda: order.append("x"), "y": lambda: order.append("y")}
    times = results.interleaved(work, 0.0, least=3)
    assert order == ["x", "y"] * 4 and {name: len(values) for name, values in times.items()} == {"x": 3, "y": 3}
    assert results.known_formats()[:2] == ["bf16", "fp32"]


def test_step(scripts: Path, tiny_llama: TinyLlama) -> None:
    step = _script("step")
    options = argparse.Namespace(
        model=str(tiny_llama(max_positions=512)), formats=["bf16", "fp32"], contexts=[32, 64], prompts=[48, 100],
        tokens=6, seconds=0.0,
    )  # fmt: skip
    with torch.inference_mode():
        step.measure(options)
    found = json.loads((scripts / "step.json").read_text())
    assert set(found["provenance"]) == PROVENANCE
    for name in options.formats:
        rows = found[f"step_{name}"]
        assert [(row["case"], row["context"]) for row in rows][:4] == [
            ("1 sequences", 32), ("4 sequences", 32), ("16 sequences", 32), ("1 sequences", 64),
        ]  # fmt: skip
        assert [row["case"] for row in rows].count("tree of 16") == 2
        for row in rows:
            assert row["floor"] == pytest.approx(row["gemms"] + row["kv"])
            assert row["ratio"] == pytest.approx(row["step"] / row["floor"])
    assert [row["tokens"] for row in found["prefill"]] == [48, 100]
    assert [row["rows"] for row in found["exact"]] == [1, 8, 32]
    assert all({"torch", "library", "torch_ratio"} <= set(row) for row in found["exact"])
    assert set(found["sampling"]["shares"]) == {"greedy", "T = 0.8", "T = 0.8, top-k 50, top-p 0.9"}
    assert all(host["ms"] > host["of that writing"] > 0 for host in found["host"].values())


def test_load(scripts: Path, tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """Three engines in turns, each on a clock of its own; then the plot of what they wrote."""
    load = _script("load")
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt": f"{word} " * 9}) + "\n" for word in ("one", "two", "three")))
    options = argparse.Namespace(
        model=str(tiny_llama(max_positions=512)), drafter="auto", dataset=dataset, levels=[1, 2], runs=2, seconds=0.0,
        tokens=6, seed=0, wrong_id=7,
    )  # fmt: skip
    began = time.perf_counter()
    with torch.inference_mode():
        load.measure(options)
    took = time.perf_counter() - began
    for name in ("load", "load_wrong"):
        levels = json.loads((scripts / f"{name}.json").read_text())["levels"]
        assert [row["streams"] for row in levels] == [1, 2]
        assert all(row["low"] <= row["ratio"] <= row["high"] for row in levels)
        outcomes = [outcome for row in levels for found in row["runs"] for outcome in found.values()]
        assert len(outcomes) == 8 and len({outcome["tokens"] for outcome in outcomes[:4]}) == 1
        assert 0 < sum(outcome["seconds"] for outcome in outcomes) < took
    load.FOLDER = scripts
    load.plot(tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().count("<path") > 4


def test_library_operations_compute_the_same(scripts: Path, tiny_llama: TinyLlama) -> None:
    """What we are measured against must do the same work: decoding, a chunk and a tree."""
    step, library = _script("step"), _script("library_ops")
    import specserve_kernels

    base = specserve_kernels.load("torch")
    folder = tiny_llama(max_positions=512)
    exact, fast, single = (
        step.load(folder, "fp32", ops) for ops in (base, library.LibraryOps(base), library.OneCallGemms(base))
    )
    with torch.inference_mode():
        for case in (step.Case(3, 40), step.Case(1, 40, 15)):
            logits = []
            for model in (exact, fast, single):
                pool = step.PagePool(24, 16)
                plans, trees = step.planned(case, pool, model.decoder.config.vocab_size)
                torch.manual_seed(1)
                logits.append(model.runner(pool).forward(step.batch.build(plans, trees)).logits)
            for other in logits[1:]:
                torch.testing.assert_close(other, logits[0], rtol=1e-3, atol=1e-3)


def test_latency(scripts: Path, tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    latency = _script("latency")
    options = argparse.Namespace(
        model=str(tiny_llama(layers=2, seed=3, max_positions=1024)), formats=["fp32"], dataset=OWN_PROMPTS,
        per_category=1, tokens=6, drafter="auto", num_draft_tokens=5, repeats=1,
    )  # fmt: skip
    latency.measure(options)
    found = json.loads((scripts / "latency.json").read_text())
    names = ["fp32 on", "fp32 off", "transformers", "transformers lookup"]
    assert list(found["summary"]) == names and {row["category"] for row in found["answers"]} == CATEGORIES
    for figures in found["summary"].values():
        assert set(figures) == {"ttft_ms", "tpot_ms", "acceptance_length", "ratio"}
    base = found["summary"]["transformers"]
    assert base["ratio"] == 1.0 == base["acceptance_length"]
    assert found["summary"]["fp32 on"]["ratio"] == pytest.approx(
        found["summary"]["fp32 on"]["tpot_ms"] / base["tpot_ms"]
    )
    assert found["identical_on_off"] == {"fp32": 6}
    assert set(found["at_once"]["fp32"]) == {"on", "off"}
    assert all(set(row) == {"category", *names} for row in found["answers"])


def test_serve_and_summary(scripts: Path, tiny_llama: TinyLlama) -> None:
    serve, summary = _script("serve"), _script("summary")
    options = argparse.Namespace(
        model=str(tiny_llama(layers=2, seed=3, max_positions=1024)), dataset=OWN_PROMPTS, num_prompts=3,
        tokens=4, concurrency=[2], rates=[50.0], goodput=["ttft:60000"],
    )  # fmt: skip
    serve.measure(options)
    found = json.loads((scripts / "serve.json").read_text())
    assert [(row["load"], row["speculation"]) for row in found["runs"]] == [
        ("2 at once", "on"), ("2 at once", "off"), ("50 requests/s", "on"), ("50 requests/s", "off"),
    ]  # fmt: skip
    assert [row["completed"] for row in found["runs"]] == [4, 4, 3, 3]
    assert all(row["request_goodput"] == row["request_throughput"] for row in found["runs"])
    text = summary.summarize(scripts).read_text()
    assert "## serve" in text and found["provenance"]["date"] in text and found["provenance"]["commit"] in text
