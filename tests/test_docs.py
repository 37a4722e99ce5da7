"""What the documents say is tried: snippets run, options, targets and links exist, the import table is the real one."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from structure.source import PURE, ROOT, modules
from structure.test_imports import TABLE, TORCH, TYPING_ONLY
from typer.core import TyperOption
from typer.main import get_command

from specserve.cli import app
from specserve.cli.demo import server

README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
STRUCTURED = ROOT / "docs" / "structured-output.md"
DOCUMENTS = sorted(path for folder in (".", "docs", "bench", "proto") for path in (ROOT / folder).glob("*.md"))
WRITTEN_ADDRESS = "127.0.0.1:50051"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(text_of(path)) if found == language]


def prose(path: Path) -> str:
    return FENCE.sub("", text_of(path))


# ---- snippets, for real


def run_snippet(path: Path, code: str) -> dict[str, Any]:
    """The names that a snippet leaves behind."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, name_of(path), "exec"), names)
    return names


def snippet(path: Path, marks: str) -> str:
    """The one Python block that mentions `marks`."""
    (code,) = (code for code in blocks(path, "python") if marks in code)
    return code


@pytest.fixture(scope="module")
def address(demo_folder: Path) -> Iterator[str]:
    """A server on the demo model, on a free loopback port."""
    with server("demo") as found:
        yield found


def test_every_python_block_is_run_below() -> None:
    known = {README: ("LLM(", "insecure_channel("), STRUCTURED: ("LLM(", "insecure_channel(")}
    for path in DOCUMENTS:
        code = blocks(path, "python")
        assert len(code) == len(known.get(path, ())), f"{name_of(path)}: a Python block that nothing runs"
        for marks in known.get(path, ()):
            snippet(path, marks)


@pytest.fixture(scope="module")
def api(demo_folder: Path) -> tuple[dict[str, Any], str]:
    """What the README's Python snippet left behind, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = run_snippet(README, snippet(README, "LLM("))
    return names, printed.getvalue()


@pytest.mark.demo
def test_the_python_api_of_the_readme(api: tuple[dict[str, Any], str]) -> None:
    names, printed = api
    assert len(names["outputs"]) == 2
    for output in names["outputs"]:
        assert output.outputs[0].text in printed and len(output.outputs[0].token_ids) > 1
        assert f"{output.metrics.speculation.acceptance_length}" in printed
    assert names["answer"][0].outputs[0].text in printed
    drafted = names["outputs"][1].metrics.speculation
    assert drafted.acceptance_length > 1.5, "the second prompt shows a draft that is accepted"


@pytest.mark.demo
def test_the_grpc_client_of_the_readme(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = snippet(README, "insecure_channel(")
    assert WRITTEN_ADDRESS in code
    names = run_snippet(README, code.replace(WRITTEN_ADDRESS, address))
    printed = capsys.readouterr().out
    assert re.search(r"FINISH_REASON_(STOP|LENGTH) acceptance length \d+\.\d\d$", printed.strip()), printed
    assert names["end"].usage.completion_tokens > 1


@pytest.mark.demo
def test_structured_output_over_grpc(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    run_snippet(STRUCTURED, snippet(STRUCTURED, "insecure_channel(").replace(WRITTEN_ADDRESS, address))
    assert capsys.readouterr().out.strip()


@pytest.mark.demo
def test_structured_output_in_python(
    api: tuple[dict[str, Any], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the engine of the README's snippet, as loading another one would take most of the time."""
    pytest.importorskip("llguidance")
    engine = api[0]["llm"]
    monkeypatch.setattr("specserve.llm.LLM", lambda model: engine)
    names = run_snippet(STRUCTURED, snippet(STRUCTURED, "LLM("))
    assert capsys.readouterr().out.strip()
    assert names["answer"][0].outputs[0].finish_reason == "stop"


# ---- commands, options, targets


# typer may bring a click of its own, so what it makes is not named by class
Command = Any


@cache
def root() -> Command:
    return get_command(app)


def commands(command: Command) -> Iterator[Command]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from commands(inner)


def flags_of(command: Command) -> set[str]:
    """Every option that the command's help lists."""
    shown = (p for p in command.params if isinstance(p, TyperOption) and not p.hidden)
    return {"--help"} | {flag for option in shown for flag in (*option.opts, *option.secondary_opts)}


def find(words: list[str]) -> tuple[Command, list[str]]:
    """The command that a line names, and what is left of the line.

    Raises:
        KeyError: there is no such command.
    """
    command = root()
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def command_faults(line: str) -> list[str]:
    """Why a line `specserve …` would not be understood; nothing is run."""
    try:
        command, words = find(shlex.split(line, comments=True)[1:])
    except KeyError as error:
        return [f"there is no command {error}"]
    unknown = sorted(set(FLAG.findall(" ".join(words))) - flags_of(command))
    if unknown:
        return [f"`specserve {command.name} --help` knows no {' '.join(unknown)}"]
    try:
        command.make_context(command.name, list(words))
    except Exception as error:
        if not hasattr(error, "format_message"):  # what a command line is refused with
            raise
        return [error.format_message()]
    return []


def command_lines(path: Path) -> list[str]:
    """Every `specserve …` line of the bash blocks; one may go over several lines within quotes."""
    lines: list[str] = []
    for block in blocks(path, "bash"):
        held = ""
        for line in block.splitlines():
            held = f"{held}\n{line}" if held else line
            if held.count('"') % 2 or held.count("'") % 2:
                continue
            lines.append(held)
            held = ""
    return [line for line in lines if line.startswith("specserve ")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_command_lines_are_understood(path: Path) -> None:
    found = [f"{line}: {fault}" for line in command_lines(path) for fault in command_faults(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_options_named_in_prose_exist(path: Path) -> None:
    every = {flag for command in commands(root()) for flag in flags_of(command)}
    for span in SPAN.findall(prose(path)):
        known = every
        if span.startswith("specserve "):
            words = [word for word in span.split()[1:] if word != "COMMAND"]
            known = flags_of(find([word for word in words if not word.startswith("-")])[0])
        assert set(FLAG.findall(span)) <= known, f"{name_of(path)}: `{span}`"


def test_the_readme_names_options() -> None:
    """So that the checks above have something to look at."""
    assert len(command_lines(README)) >= 8
    assert set(FLAG.findall(text_of(README))) >= {"--json", "--quantization", "--speculate"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("specserve generate hello --max-token 3", "knows no --max-token"),
        ("specserve bench serve --quantise", "knows no --quantise"),
        ("specserve frobnicate", "no command 'frobnicate'"),
        ("specserve generate hello --max-tokens many", "valid integer"),
        ("specserve generate", "Missing argument"),
    ],
)
def test_the_command_checker_catches(line: str, expected: str) -> None:
    (found,) = command_faults(line)
    assert expected in found


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_make_targets_exist(path: Path) -> None:
    rules = set(re.findall(r"^([a-z][a-z-]*):", text_of(ROOT / "Makefile"), re.MULTILINE))
    code = [*SPAN.findall(prose(path)), *(code for _, code in FENCE.findall(text_of(path)))]
    named = {name for span in code for name in re.findall(r"^make ([a-z][a-z-]*)\b", span, re.MULTILINE)}
    assert named <= rules, f"{name_of(path)}: the Makefile has no rule for {sorted(named - rules)}"


# ---- the import table


def parsed_table() -> dict[str, set[str]]:
    """The table of docs/architecture.md: what each row may import, typing-only names included."""
    lines = text_of(ARCHITECTURE).split("| who | may import |\n")[1].split("\n\n")[0].splitlines()[1:]
    found: dict[str, set[str]] = {}
    for line in lines:
        who, may = (cell.strip() for cell in line.strip("|").split("|"))
        rows = [name.replace("/", ".") for name in SPAN.findall(who)]
        if who.startswith("*pure*"):
            assert tuple(rows) == PURE, "the pure modules, left to right"
            continue
        allowed = {name.replace("/", ".") for name in SPAN.findall(may)}
        allowed |= set(PURE) if re.search(r"\bpure\b", may) else set()
        allowed |= {TORCH} if re.search(r"\btorch\b", may) else set()
        if may == "everything above":
            allowed = {*PURE, TORCH, *found}
        if may.startswith("anything in specserve"):
            allowed |= {name for name in existing() if not name.startswith(("specserve_kernels", "specserve_drafts"))}
        for row in rows:
            found[row] = allowed - {row}
    return found


def existing() -> set[str]:
    """Rows of the enforced table that have a module, and the pure modules."""
    names = {module.name for module in modules()}
    return {row for row in {*TABLE, *PURE} if row in names or f"specserve.{row}" in names}


def test_the_import_table_names_what_exists() -> None:
    rows = set(parsed_table())
    assert rows == existing() - set(PURE), "rows of docs/architecture.md, and rows that have a module"
    assert existing() >= set(PURE)


def test_the_import_table_is_the_one_that_is_enforced() -> None:
    known = existing() | {TORCH}
    for row, allowed in parsed_table().items():
        enforced = (TABLE[row] | TYPING_ONLY.get(row, frozenset())) & known - {row}
        if row == "cli":
            enforced |= {"cli"} & allowed
        assert allowed == enforced, f"{row}: docs/architecture.md has {sorted(allowed ^ enforced)} otherwise"


# ---- links


def anchors(path: Path) -> set[str]:
    """The fragments that GitHub gives to a document's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose(path), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (name := slug if not number else f"{slug}-{number}") in found:
            number += 1
        found.add(name)
    return found


def broken_links(path: Path, text: str) -> list[str]:
    """Relative links of a document that lead nowhere; `text` is its prose."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or not there.is_relative_to(ROOT):
            found.append(f"{target}: no such file")
        elif fragment and fragment not in anchors(there):
            found.append(f"{target}: no such heading")
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    found = broken_links(path, prose(path))
    assert not found, f"{name_of(path)}: {found}"


def test_the_link_checker_catches() -> None:
    text = (
        "[a](docs/architecture.md#the-words) [b](docs/none.md) [c](docs/architecture.md#none) [d](#none) [e](mailto:x)"
    )
    assert [fault.partition(":")[0] for fault in broken_links(README, text)] == [
        "docs/none.md",
        "docs/architecture.md#none",
        "#none",
    ]
