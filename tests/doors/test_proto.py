"""The wire contract: presence where zero has a meaning, names and comments as buf asks, generated code up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from specserve.v1 import inference_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto/specserve/v1/inference.proto"
OPTIONAL = {
    "SamplingParams": [
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "logprobs",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "prompt_logprobs",
    ],
    "StoppingParams": ["max_tokens", "min_tokens"],
    "SpeculationParams": ["drafter", "num_draft_tokens"],
    "TokenLogprobs": ["logprob"],
    "Token": ["logprob"],
    "SpeculationStats": ["inactive_reason"],
}
# Zero and absent ask for the same: no presence needed.
ZERO_IS_UNSET = {
    "GenerateRequest": ["request_id", "priority", "cache_salt"],
    "SamplingParams": ["logprobs_mode"],
    "StoppingParams": ["ignore_eos", "include_stop_str_in_output"],
}


def test_optional_where_zero_has_a_meaning() -> None:
    found = {
        name: [field.name for field in message.fields if _is_optional(field)]
        for name, message in pb.DESCRIPTOR.message_types_by_name.items()
    }
    assert {name: names for name, names in found.items() if names} == OPTIONAL


def test_every_request_scalar_was_decided() -> None:
    for name in ("GenerateRequest", "SamplingParams", "StoppingParams", "SpeculationParams"):
        message = pb.DESCRIPTOR.message_types_by_name[name]
        scalars = [f.name for f in message.fields if not f.is_repeated and not f.message_type and not _in_oneof(f)]
        assert sorted(scalars) == sorted(OPTIONAL.get(name, []) + ZERO_IS_UNSET.get(name, [])), name


def _is_optional(field: FieldDescriptor) -> bool:
    oneof = field.containing_oneof
    return oneof is not None and oneof.name == f"_{field.name}"


def _in_oneof(field: FieldDescriptor) -> bool:
    return field.containing_oneof is not None and not _is_optional(field)


def test_real_numbers_of_a_request_are_doubles() -> None:
    # A float would turn 0.8 into 0.800000012 and draw other tokens than in process.
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert pb.SamplingParams(**{name: 0.8}).__getattribute__(name) == 0.8
    assert pb.SamplingParams(logit_bias={3: 0.8}).logit_bias[3] == 0.8


def test_every_declaration_has_a_comment() -> None:
    previous, bare = "", []
    for line in PROTO.read_text().splitlines():
        text = line.strip()
        declares = re.match(r"(service|rpc|message|enum|oneof)\s|[\w.<>, ]+\s\w+\s=\s\d+;|[A-Z_]+\s=\s\d+;", text)
        if declares and not text.startswith("//") and not previous.startswith("//"):
            bare.append(text)
        previous = text
    assert bare == []


def test_enum_values_are_prefixed_and_start_unspecified() -> None:
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper()
        assert enum.values[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(f"{prefix}_") for value in enum.values)


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto"), *outputs, str(PROTO)]
    subprocess.run(command, check=True, capture_output=True)
    for made in (tmp_path / "specserve/v1").iterdir():
        assert made.read_text() == (ROOT / "specserve/v1" / made.name).read_text(), f"{made.name}: run `make proto`"
