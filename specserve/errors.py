"""Every failure that specserve reports, as one tree.

SpecserveError
├── InvalidRequest            the caller can fix it: names the field, what was given, what is allowed
│   ├── ContextLengthExceeded prompt (+ max_tokens) can never fit the model or the pool
│   └── GrammarInvalid        the answer's grammar cannot be compiled, or costs too much
├── GrammarStuck              the answer's grammar and bans leave no token to draw
├── ConfigError               an engine option is unknown, out of range, or contradicts another
├── ModelError                a model folder or file cannot be used
│   ├── ModelNotFound         no such name, folder or file
│   └── WeightsError          tensors missing, unexpected, wrong-shaped or wrong-typed
├── Overloaded                the queue is full; try again later
├── Unavailable               loading or draining; another replica may answer
├── DeadlineExceeded          the caller's deadline passed while queued or running
├── Cancelled                 the caller went away or aborted
├── NumericFault              non-finite values in this request's rows
├── EngineFault               the engine failed while serving this request
└── PoolExhausted             internal: pages were taken that `try_` calls had refused

Doors translate `status` (a gRPC status name) and `reason` (a stable word for programs) and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that was refused, and why."""

    field: str
    description: str


class SpecserveError(Exception):
    """Base of all errors raised on purpose. `metadata` holds the numbers that the message names."""

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: dict[str, str] = dict(metadata or {})


class InvalidRequest(SpecserveError):
    """A request that cannot be served as written."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_ARGUMENT"

    def __init__(self, violations: list[FieldViolation], *, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations), metadata=metadata)
        self.violations = violations


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt + max_tokens, is longer than the model's context or the whole pool."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class GrammarInvalid(InvalidRequest):
    """A grammar that cannot be compiled, matches nothing, or costs too much to follow."""

    reason = "GRAMMAR_INVALID"


class GrammarStuck(SpecserveError):
    """Nothing may follow what was answered so far."""

    status = "FAILED_PRECONDITION"
    reason = "CONSTRAINT_FAILED"


class ConfigError(SpecserveError):
    """An engine option that cannot be honoured."""

    status = "INVALID_ARGUMENT"
    reason = "CONFIG_INVALID"


class ModelError(SpecserveError):
    """A model that cannot be loaded."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL_INVALID"


class ModelNotFound(ModelError):
    """Nothing is where the model name points."""

    status = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"


class WeightsError(ModelError):
    """The tensors are not the ones that the configuration asks for."""

    reason = "WEIGHTS_INVALID"


class Overloaded(SpecserveError):
    """The engine's bounded queue is full."""

    status = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_FULL"


class Unavailable(SpecserveError):
    """The engine takes no requests now."""

    status = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class DeadlineExceeded(SpecserveError):
    """The request's deadline passed."""

    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class Cancelled(SpecserveError):
    """The request was aborted by its caller."""

    status = "CANCELLED"
    reason = "CANCELLED"


class NumericFault(SpecserveError):
    """A row of this request was not finite."""

    reason = "NUMERIC_FAULT"


class EngineFault(SpecserveError):
    """A step failed; the message names the exception."""

    reason = "ENGINE_FAULT"


class PoolExhausted(SpecserveError):
    """A page was demanded that the pool does not have."""

    reason = "POOL_EXHAUSTED"
