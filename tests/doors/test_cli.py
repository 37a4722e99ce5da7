"""The command line: what it prints where, its exit codes, and that looking at it costs nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from specserve import __version__
from specserve.cli import app, main
from specserve.cli.options import Sampling, predicted_text
from specserve.constraint import GrammarSpec
from specserve.errors import ConfigError
from specserve.request import SamplingParams
from specserve.v1 import inference_pb2 as pb
from specserve.v1 import inference_pb2_grpc as pb_grpc

ROOT = Path(__file__).resolve().parents[2]
WIDE = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
KEYS = {
    "usage": {"prompt_tokens", "completion_tokens", "cached_tokens"},
    "speculation": {
        "drafter",
        "num_steps",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "acceptance_length",
        "accepted_per_position",
        "drafted_per_position",
        "inactive_reason",
    },
    "timing": {"queue_ms", "ttft_ms", "tpot_ms", "e2e_ms"},
}
ANSWER_KEYS = {"text", "token_ids", "finish_reason", "seed", *KEYS}
TinyLlama = Callable[..., Path]
Run = Callable[..., "Done"]


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`specserve` in this process, through `main`; importing torch again in another would cost seconds a test."""
    monkeypatch.setenv("COLUMNS", "200")

    def main_with(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["specserve", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return Done(int(stop.value.code or 0), *capfd.readouterr())

    return main_with


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> str:
    return str(tiny_llama(layers=2, seed=3))


def _generate(model: str, *arguments: str) -> Any:
    result = CliRunner().invoke(app, ["generate", "the world", "--model", model, "--json", *arguments])
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"specserve {__version__}\n")


@pytest.mark.parametrize("command", ["pull", "serve", "generate", "chat", "demo"])
def test_help_loads_nothing_heavy(command: str) -> None:
    code = (
        "import sys; from specserve.cli import app\n"
        f"try: app(['{command}', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'grpc', 'transformers', 'google', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=WIDE, capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]\n" and "Usage:" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", "--speculate", "ngam"], "drafter is 'ngam'. Did you mean 'ngram'?"),
        (["generate", "x", "--num-draft-tokens", "65"], "num_draft_tokens is 65; allowed: 0 to 64"),
        (["generate", "x", "--dtype", "float8"], "dtype is 'float8'; allowed: auto, bfloat16, float32"),
        (["generate", "x", "--model", "no-such-model"], "no model 'no-such-model'"),
        (["generate", "x", "--regex", "a", "--choice", "a"], "--regex and --choice were given"),
        (["generate", "x", "--json-schema", "no-such-file"], "--json-schema 'no-such-file' is neither a text with '{'"),
        (["serve", "--block-size", "0"], "page_size is 0; it must be at least 1 token"),
        (["serve", "--port", "0", "--model", "no-such-model"], "no model 'no-such-model'"),
        (["pull", "no-such-model"], "no model 'no-such-model'"),
    ],
)
def test_a_refused_option_is_one_line_and_exit_code_2(run: Run, arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.startswith("specserve: ") and done.stderr.count("\n") == 1


def test_an_unknown_option_names_the_nearest(run: Run) -> None:
    done = run("serve", "--max-num-seq", "3")
    assert done.returncode == 2
    assert "--max-num-seq" in done.stderr and "--max-num-seqs" in done.stderr


def test_a_refused_request_prints_nothing_on_stdout(run: Run, model: str) -> None:
    done = run("generate", "the world", "--model", model, "--json", "--top-p", "0", "--temperature", "-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "temperature: is -1.0; allowed: 0 (greedy) to 100; top_p: is 0.0" in done.stderr


def test_json_is_one_object_with_the_promised_keys(model: str) -> None:
    command = [sys.executable, "-m", "specserve.cli", "generate", "the world", "--model", model, "--json"]
    done = subprocess.run(
        [*command, "--max-tokens", "12"], cwd=ROOT, env=WIDE, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1 and set(answer) == ANSWER_KEYS
    assert all(set(answer[name]) == keys for name, keys in KEYS.items())
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) <= 12
    assert answer["finish_reason"] in ("stop", "length") and isinstance(answer["seed"], int)
    assert answer["speculation"]["acceptance_length"] >= 1.0


def test_sampling_options_become_parameters(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    given = Sampling(seed=3, top_k=4, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5)
    wanted = SamplingParams(
        seed=3, top_k=4, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, n=2, temperature=0.5
    )
    assert given.params(0.5, n=2) == wanted
    assert Sampling(bad_word=["a", "b"]).params(1.0) == SamplingParams(bad_words=("a", "b"))
    for option, spec in (
        ({"json_schema": str(schema)}, GrammarSpec("json_schema", '{"type": "object"}')),
        ({"json_schema": "{}"}, GrammarSpec("json_schema", "{}")),
        ({"json_object": True}, GrammarSpec("json_object")),
        ({"regex": "[0-9]+"}, GrammarSpec("regex", "[0-9]+")),
        ({"lark": 'start: "a"'}, GrammarSpec("lark", 'start: "a"')),
        ({"choice": ["yes", "no"]}, GrammarSpec("choice", ("yes", "no"))),
    ):
        assert Sampling(**option).params(1.0) == SamplingParams(grammar=spec)


def test_a_penalty_reaches_the_engine(model: str) -> None:
    plain = _generate(model, "--max-tokens", "12")
    penalised = _generate(model, "--max-tokens", "12", "--repetition-penalty", "100")
    assert penalised["token_ids"] != plain["token_ids"]


def test_speculation_changes_no_token(model: str) -> None:
    options = ("--max-tokens", "40", "--temperature", "0.8", "--seed", "7")
    off = _generate(model, "--speculate", "off", *options)
    on = _generate(model, "--speculate", "ngram", *options)
    assert on["token_ids"] == off["token_ids"] and on["text"] == off["text"] and on["seed"] == 7
    assert off["speculation"]["drafter"] == "off" and off["speculation"]["inactive_reason"]


def test_a_prediction_is_drafted_and_changes_no_token(model: str, tmp_path: Path) -> None:
    options = ("--max-tokens", "24", "--num-draft-tokens", "5")
    plain = _generate(model, "--speculate", "off", *options)
    (tmp_path / "expected.txt").write_text("a long text that is not what comes", encoding="utf-8")
    for given in ("a long text", f"@{tmp_path / 'expected.txt'}"):
        answer = _generate(model, "--speculate", "prediction", "--prediction", given, *options)
        assert answer["token_ids"] == plain["token_ids"]
        assert answer["speculation"]["num_draft_tokens"] > 0
    with pytest.raises(ConfigError, match="the file 'no/such' cannot be read"):
        predicted_text("@no/such")


def test_n_adds_choices(model: str) -> None:
    options = ("--max-tokens", "8", "--temperature", "1", "--seed", "7")
    three, one = _generate(model, "--n", "3", *options), _generate(model, *options)
    assert set(three) == ANSWER_KEYS | {"choices"}
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert all(set(choice) == ANSWER_KEYS | {"index"} for choice in three["choices"])
    assert three["token_ids"] == three["choices"][0]["token_ids"] == one["token_ids"]


def test_raw_uses_no_template(model: str) -> None:
    raw, chat = _generate(model, "--raw", "--max-tokens", "2"), _generate(model, "--max-tokens", "2")
    assert raw["usage"]["prompt_tokens"] < chat["usage"]["prompt_tokens"]


def test_streamed_text_is_the_whole_text(model: str) -> None:
    whole = _generate(model, "--max-tokens", "24")["text"]
    result = CliRunner().invoke(app, ["generate", "the world", "--model", model, "--max-tokens", "24"])
    assert result.stdout == whole + "\n"
    assert "acceptance length" in result.stderr


def test_chat_remembers(model: str) -> None:
    said = "the world\n\nand the\n"
    result = CliRunner().invoke(app, ["chat", "--model", model, "--max-tokens", "4", "--temperature", "0"], input=said)
    assert result.exit_code == 0, result.exception
    assert result.stderr.count("acceptance length") == 2


def test_a_turn_that_does_not_fit_is_refused_and_the_conversation_goes_on(model: str) -> None:
    said = "the " * 60 + "\nthe\n"
    arguments = ["chat", "--model", model, "--max-model-len", "48", "--max-tokens", "2"]
    result = CliRunner().invoke(app, arguments, input=said)
    assert result.exit_code == 0, result.exception
    assert "do not fit the model's context of 48 tokens" in result.stderr
    assert result.stderr.count("acceptance length") == 1


def test_serve_from_start_to_signal(model: str) -> None:
    command = [sys.executable, "-m", "specserve.cli", "serve", "--model", model, "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, env=WIDE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            lines = []
            while not (lines and lines[-1].startswith("ready: ")):
                lines.append(server.stdout.readline())
                assert lines[-1], "the server ended early"
            pattern = r"KV cache: \d+ tokens in \d+ pages of 16 \(\d+ MiB\); maximum concurrency at \d+ tokens"
            assert any(re.match(pattern, line) for line in lines)
            with grpc.insecure_channel(lines[-1].rpartition(" on ")[2].strip()) as channel:
                stopping = pb.StoppingParams(max_tokens=4, ignore_eos=True)
                request = pb.GenerateRequest(text="the world", stopping=stopping)
                responses = list(pb_grpc.InferenceServiceStub(channel).Generate(request, timeout=60))
            assert responses[-1].finished.usage.completion_tokens == 4
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_a_taken_port_is_told(run: Run, model: str) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("serve", "--model", model, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert re.search(r"cannot listen on 127\.0\.0\.1:\d+; is the port taken\?", done.stderr)
