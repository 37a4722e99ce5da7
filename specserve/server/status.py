"""One error, one gRPC status: code, message and `google.rpc` details.

`ErrorInfo.reason` is the word that programs look at, `metadata` holds the numbers that the message names,
`BadRequest` names the fields, `RetryInfo` says when to come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from specserve.errors import InvalidRequest, Overloaded, SpecserveError, Unavailable

DOMAIN = "specserve"
RETRY_DELAY_S = 1
# Details travel in a trailer, and gRPC peers refuse more than 8 KiB of metadata by default: sizes in bytes.
MAX_MESSAGE_LEN = 600
MAX_TEXT_LEN = 160
MAX_VIOLATIONS = 16
NO_PATHS: Mapping[str, str] = {}


def to_status(error: Exception, paths: Mapping[str, str] = NO_PATHS) -> Any:
    """The `google.rpc.Status` of an error; `paths` gives the wire path of a field of `Request`.

    Errors outside our tree are INTERNAL and tell their type only: their text may hold another caller's data.
    """
    if not isinstance(error, SpecserveError):
        error = SpecserveError(f"unexpected {type(error).__name__}; the server's log has it")
    code = code_pb2.Code.Value(error.status)
    status = status_pb2.Status(code=code, message=_shortened(error.message, MAX_MESSAGE_LEN))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    info.metadata.update({key: _shortened(value) for key, value in error.metadata.items()})
    _add(status, info)
    if isinstance(error, InvalidRequest):
        _add(status, _bad_request(error, paths))
    if isinstance(error, Overloaded | Unavailable):
        delay = duration_pb2.Duration(seconds=RETRY_DELAY_S)
        _add(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _bad_request(error: InvalidRequest, paths: Mapping[str, str]) -> Any:
    details = error_details_pb2.BadRequest()
    for violation in error.violations[:MAX_VIOLATIONS]:
        name, bracket, index = violation.field.partition("[")
        path = paths.get(name, name) + bracket + index
        details.field_violations.add(field=path, description=_shortened(violation.description))
    return details


def _shortened(text: str, limit: int = MAX_TEXT_LEN) -> str:
    raw = text.encode()
    return text if len(raw) <= limit else raw[: limit - 3].decode(errors="ignore") + "…"


def _add(status: Any, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
