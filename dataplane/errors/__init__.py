"""Every error this package raises on purpose, and the one way they cross a wire.

    DataPlaneError
    ├── NotFoundError (KeyError)
    │   ├── PartitionNotFoundError      nobody registered the partition
    │   ├── TaskNotFoundError           the partition has no such consumer task
    │   ├── FieldNotFoundError          nobody declared or produced the field
    │   ├── SampleNotFoundError         no live sample has the id
    │   ├── FieldNotProducedError       the sample lives, the cell was never written
    │   └── StaleSampleError            the id may live again, but the sample meant was cleared
    ├── BadRequestError (ValueError)
    │   ├── SampleExistsError           mode="create" met ids that live
    │   ├── PartitionExistsError        a restore met a partition that lives
    │   ├── CheckpointError             a checkpoint is damaged, unfinished or of another version; names the file
    │   ├── SchemaError                 kind, dtype or inner shape differs from the field's
    │   ├── StaleSchemaError            a put was encoded under a schema that no longer holds
    │   ├── InvalidRequestError         duplicates, wrong counts, malformed arguments
    │   ├── RowsChangedError            another writer changed rows that were to be appended to
    │   ├── ShareConflictError          a rank's share of a step went back, and another claim has it
    │   ├── PartitionSealedError        new ids after a seal
    │   ├── PartitionDroppedError       the partition went while a call waited on it
    │   ├── RequestTooLargeError        can never fit, whatever is cleared
    │   ├── LimitError                  more than the service takes of something; says how many, and how many it takes
    │   ├── StaleCallError              a command number that the session has settled
    │   ├── ClientClosedError           the client was closed (also by a fork or close() under way)
    │   └── RolloutAbortedError         a replay buffer does not want what was produced any more
    ├── UnsupportedValueError (TypeError)   a value the columns cannot carry
    ├── WaitTimeoutError (TimeoutError)
    │   ├── CapacityTimeoutError        no space came in time; names who holds it
    │   ├── ClaimTimeoutError           samples did not become claimable in time; says what is missing
    │   └── CallTimeoutError            no answer from a process in time
    ├── ServiceError (ConnectionError)
    │   ├── ServiceUnavailableError     nothing answers at the address
    │   ├── AuthenticationError         token missing or wrong
    │   ├── TlsError                    the ends do not come together: one without TLS, or a certificate not taken
    │   ├── ProtocolVersionError        client and controller do not speak alike; names both versions
    │   ├── SessionExpiredError         the service gave this session up
    │   ├── ServiceRestartedError       another epoch of the service answers
    │   ├── StorageUnitError            a storage unit refused or is gone
    │   └── CallCancelledError          the call was withdrawn before it took effect
    ├── ChecksumError (OSError)         what was read is not what was written; names sample, field and unit
    ├── PortTakenError (OSError)        a port to listen on is in use; says by whom, if it can
    ├── ArenaSpaceError (OSError)       the file system or cgroup has too little memory for the arena
    ├── DrainError (RuntimeError)       a storage unit could not be emptied; says what is left, and why
    ├── StateDirError (OSError)         the service's state directory cannot be used, read or written
    ├── CheckpointWriteError (OSError)  the file system did not take a checkpoint; names file and cause
    └── InternalError (RuntimeError)    a defect of the service; its log has the command

Facts are attributes, named as the constructor's keywords. `to_wire` and `from_wire` carry any of these between
processes without pickle; pickling works too (Ray moves exceptions that way).
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import msgspec

from dataplane.errors.base import SHOWN as SHOWN
from dataplane.errors.base import DataPlaneError as DataPlaneError
from dataplane.errors.base import first_few as first_few
from dataplane.errors.base import rebuild
from dataplane.errors.missing import FieldNotFoundError as FieldNotFoundError
from dataplane.errors.missing import FieldNotProducedError as FieldNotProducedError
from dataplane.errors.missing import NotFoundError as NotFoundError
from dataplane.errors.missing import PartitionNotFoundError as PartitionNotFoundError
from dataplane.errors.missing import SampleNotFoundError as SampleNotFoundError
from dataplane.errors.missing import StaleSampleError as StaleSampleError
from dataplane.errors.missing import TaskNotFoundError as TaskNotFoundError
from dataplane.errors.service import AuthenticationError as AuthenticationError
from dataplane.errors.service import CallCancelledError as CallCancelledError
from dataplane.errors.service import ProtocolVersionError as ProtocolVersionError
from dataplane.errors.service import ServiceError as ServiceError
from dataplane.errors.service import ServiceRestartedError as ServiceRestartedError
from dataplane.errors.service import ServiceUnavailableError as ServiceUnavailableError
from dataplane.errors.service import SessionExpiredError as SessionExpiredError
from dataplane.errors.service import StorageUnitError as StorageUnitError
from dataplane.errors.service import TlsError as TlsError
from dataplane.errors.storage import ArenaSpaceError as ArenaSpaceError
from dataplane.errors.storage import CheckpointWriteError as CheckpointWriteError
from dataplane.errors.storage import ChecksumError as ChecksumError
from dataplane.errors.storage import DrainError as DrainError
from dataplane.errors.storage import StateDirError as StateDirError

# --- refused: the caller's mistake ----------------------------------------------------------------------------


class BadRequestError(DataPlaneError, ValueError):
    """The request was understood and refused; nothing changed."""

    grpc_status = "INVALID_ARGUMENT"


class SampleExistsError(BadRequestError):
    grpc_status = "ALREADY_EXISTS"

    def __init__(self, *, partition: str, samples: Sequence[str], total: int | None = None) -> None:
        count = len(samples) if total is None else total
        super().__init__(
            f"sample {first_few(samples, count)} already lives in partition {partition!r}; "
            "mode='create' makes new samples only (use 'upsert', or clear them first)",
            partition=partition,
            samples=list(samples)[:SHOWN],
            total=count,
        )


class PartitionExistsError(BadRequestError):
    grpc_status = "ALREADY_EXISTS"

    def __init__(self, *, partition: str) -> None:
        super().__init__(
            f"partition {partition!r} exists already; clear it, restore others only (partitions=), or restore over it "
            "(replace=True)",
            partition=partition,
        )


class CheckpointError(BadRequestError):
    """A checkpoint that cannot be used: `file` is the path that is wrong, `why` says how. Nothing was restored, or
    written."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, file: str, why: str) -> None:
        super().__init__(f"checkpoint file {file}: {why}", file=file, why=why)


UNDECLARED = "an undeclared field"
"""`got` of the `SchemaError` for a field that a strict schema lacks."""


class SchemaError(BadRequestError):
    """A put differs from the field's schema or from its live rows."""

    def __init__(self, *, partition: str, field: str, got: str, expected: str, hint: str = "") -> None:
        way = hint or "Convert the values, clear the field's live rows, or register the partition with another schema."
        super().__init__(
            f"field {field!r} of partition {partition!r}: got {got}, expected {expected}. {way}",
            partition=partition,
            field=field,
            got=got,
            expected=expected,
            hint=hint,
        )


class StaleSchemaError(BadRequestError):
    """A column was encoded as the kind that the schema named when the writer asked, and the schema names none now."""

    grpc_status = "ABORTED"

    def __init__(self, *, partition: str, field: str) -> None:
        super().__init__(
            f"field {field!r} of partition {partition!r} was encoded for a schema that no longer holds: the field was "
            "cleared or registered anew, and its kind is open now. Nothing was stored. Put it again; if this repeats, "
            "declare the field's kind in register_partition.",
            partition=partition,
            field=field,
        )


class InvalidRequestError(BadRequestError):
    def __init__(self, message: str) -> None:
        super().__init__(message, message=message)


class RowsChangedError(BadRequestError):
    """Rows are not what a writer who builds on them had read."""

    grpc_status = "ABORTED"

    def __init__(self, *, partition: str, field: str, samples: Sequence[str], total: int | None = None) -> None:
        count = len(samples) if total is None else total
        super().__init__(
            f"field {field!r} of sample {first_few(samples, count)} (partition {partition!r}) was written by another "
            "while this client was appending to it; nothing was appended. Let one writer at a time append to a sample.",
            partition=partition,
            field=field,
            samples=list(samples)[:SHOWN],
            total=count,
        )


class ShareConflictError(BadRequestError):
    """Part of a rank's share went back to the pool (its hold or lease ended, or its claim was given back) and was
    claimed by another since."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(
        self, *, partition: str, task: str, step: int, rank: int, samples: Sequence[str], total: int | None = None
    ) -> None:
        count = len(samples) if total is None else total
        super().__init__(
            f"sample {first_few(samples, count)} of rank {rank}'s share of step {step} of task {task!r} (partition "
            f"{partition!r}) went back when its time was over or its claim was given up, and another claim has it now. "
            "Go on with the next step; ask sooner, or with a longer lease_s.",
            partition=partition,
            task=task,
            step=step,
            rank=rank,
            samples=list(samples)[:SHOWN],
            total=count,
        )


class PartitionSealedError(BadRequestError):
    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, partition: str, samples: Sequence[str], total: int | None = None) -> None:
        count = len(samples) if total is None else total
        super().__init__(
            f"partition {partition!r} is sealed: sample {first_few(samples, count)} would be new. "
            "Register the partition again to begin a new count.",
            partition=partition,
            samples=list(samples)[:SHOWN],
            total=count,
        )


class PartitionDroppedError(BadRequestError):
    grpc_status = "ABORTED"

    def __init__(self, *, partition: str, waiting: str) -> None:
        super().__init__(
            f"partition {partition!r} was dropped while {waiting} waited on it", partition=partition, waiting=waiting
        )


class RequestTooLargeError(BadRequestError):
    grpc_status = "OUT_OF_RANGE"

    def __init__(self, *, wanted_bytes: int, limit_bytes: int, what: str, hint: str = "") -> None:
        way = hint or "Put fewer rows at a time or start the service with a larger --capacity."
        super().__init__(
            f"{what} needs {wanted_bytes:,} bytes, more than the {limit_bytes:,} it could ever get. {way}",
            wanted_bytes=wanted_bytes,
            limit_bytes=limit_bytes,
            what=what,
            hint=hint,
        )


class LimitError(BadRequestError):
    """`got` of `what` where the service takes `limit` at most; `hint` says what to do."""

    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, *, what: str, got: int, limit: int, hint: str) -> None:
        super().__init__(
            f"{what}: {got:,}, and the limit is {limit:,}. {hint}", what=what, got=got, limit=limit, hint=hint
        )


class StaleCallError(BadRequestError):
    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, session: int, number: int, watermark: int) -> None:
        super().__init__(
            f"call {number} of session {session} was answered or given up before (the watermark is {watermark}), and "
            "is never executed again",
            session=session,
            number=number,
            watermark=watermark,
        )


class ClientClosedError(BadRequestError):
    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, why: str = "close() was called") -> None:
        super().__init__(f"this client is closed: {why}", why=why)


class RolloutAbortedError(BadRequestError):
    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, samples: Sequence[str], why: str) -> None:
        named = list(samples)
        super().__init__(f"samples {first_few(named)} are not wanted any more: {why}", samples=named, why=why)


# --- wrong kind of value --------------------------------------------------------------------------------------


class UnsupportedValueError(DataPlaneError, TypeError):
    """A value that no column kind can carry; names field, row (or None) and type."""

    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, *, field: str, row: int | None, got: str, hint: str) -> None:
        where = f"field {field!r}" if row is None else f"field {field!r}, row {row}"
        super().__init__(f"{where}: cannot store {got}. {hint}", field=field, row=row, got=got, hint=hint)


# --- waited too long ------------------------------------------------------------------------------------------


class WaitTimeoutError(DataPlaneError, TimeoutError):
    """A wait reached its deadline; nothing was taken or changed."""

    grpc_status = "DEADLINE_EXCEEDED"


class CapacityTimeoutError(WaitTimeoutError):
    """`holders` are (who, bytes) pairs, largest first: partitions, then reservations and pins by session. With
    `partition` it is that partition's budget, of `budget_bytes`, that is used up. `arena` says why an arena did not get
    memory that it may have. With `fragments` bytes enough are free, but in so many pieces, of which the largest has
    `largest_free_bytes`. `behind` is the earlier put that this one had to wait for, though there was space for it."""

    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(
        self,
        *,
        wanted_bytes: int,
        free_bytes: int,
        waited_s: float,
        holders: Sequence[tuple[str, int]],
        partition: str = "",
        budget_bytes: int | None = None,
        arena: str = "",
        fragments: int = 0,
        largest_free_bytes: int = 0,
        behind: str = "",
    ) -> None:
        held = "; ".join(f"{who} holds {size:,}" for who, size in holders[:SHOWN]) or "nobody holds any"
        free, way = "free to this put", "start the service with a larger --capacity"
        if budget_bytes is not None:
            free += f" of the {budget_bytes:,} in the budget of partition {partition!r}"
            way = "register the partition with a larger budget_bytes"
        if fragments:
            free += f", but fragmented: {fragments:,} pieces of at most {largest_free_bytes:,}"
            way = f"put smaller samples, or {way}"
        if behind:
            free += f", but behind {behind}, which finds no space: first come, first served"
            way = f"{way}, so that the earlier put finds space, or give that up"
        remedy = (
            f"{arena.rstrip('.')}. Mend that, or clear consumed samples."
            if arena
            else f"Clear consumed samples, or {way}."
        )
        super().__init__(
            f"no space for {wanted_bytes:,} bytes within {waited_s:.1f} s ({free_bytes:,} {free}): {held}. {remedy}",
            wanted_bytes=wanted_bytes,
            free_bytes=free_bytes,
            waited_s=waited_s,
            holders=[(who, int(size)) for who, size in holders[:SHOWN]],
            partition=partition,
            budget_bytes=budget_bytes,
            arena=arena,
            fragments=fragments,
            largest_free_bytes=largest_free_bytes,
            behind=behind,
        )


class ClaimTimeoutError(WaitTimeoutError):
    """`ready` samples would have done, of the `wanted`; `why` says what was missing. The facts it says that from are
    attributes too, named as those of `DataPlaneClient.why_blocked`'s result (but `ready`); `writers` are dicts."""

    def __init__(
        self, *, partition: str, task: str, wanted: int, ready: int, waited_s: float, why: str, **facts: Any
    ) -> None:
        super().__init__(
            f"task {task!r} waited {waited_s:.1f} s for {wanted} samples of partition {partition!r}; "
            f"{ready} were ready: {why}. Nothing was claimed.",
            partition=partition,
            task=task,
            wanted=wanted,
            ready=ready,
            waited_s=waited_s,
            why=why,
            **{name: list(fact) if isinstance(fact, tuple) else fact for name, fact in facts.items()},
        )


class CallTimeoutError(WaitTimeoutError):
    def __init__(self, *, what: str, waited_s: float, peer: str) -> None:
        super().__init__(
            f"{what}: no answer from {peer} within {waited_s:.1f} s. It may be stopped, busy or cut off; see its log.",
            what=what,
            waited_s=waited_s,
            peer=peer,
        )


# --- the service, or the way to it ----------------------------------------------------------------------------


class PortTakenError(DataPlaneError, OSError):
    """Nothing can listen on `address`. `holder`: who does, or has another socket there; "" if that is not known."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, address: str, holder: str = "", hint: str = "") -> None:
        by = f" by {holder}" if holder else ""
        way = hint or "End that, or choose another port."
        super().__init__(
            f"cannot listen on {address}: the port is in use{by}. {way}", address=address, holder=holder, hint=hint
        )
        self.errno = errno.EADDRINUSE


class InternalError(DataPlaneError, RuntimeError):
    grpc_status = "INTERNAL"

    def __init__(self, *, what: str) -> None:
        super().__init__(
            f"internal error in the service: {what}. Its log has the command; please report it.", what=what
        )


# --- the wire -------------------------------------------------------------------------------------------------


def _leaves(cls: type[DataPlaneError]) -> list[type[DataPlaneError]]:
    below = [leaf for sub in cls.__subclasses__() for leaf in _leaves(sub)]
    return below if below else [cls]


ERROR_TYPES: dict[str, type[DataPlaneError]] = {leaf.__name__: leaf for leaf in _leaves(DataPlaneError)}


def to_wire(error: DataPlaneError) -> tuple[str, bytes]:
    """(class name, msgpack of its facts)."""
    return type(error).__name__, msgspec.msgpack.encode(error.facts)


def from_wire(name: str, facts: bytes) -> DataPlaneError:
    """The error that `to_wire` wrote. A name this version does not know, and facts that make no such error, become an
    `InternalError` that says so."""
    known = ERROR_TYPES.get(name)
    if known is None:
        return InternalError(what=f"{name[:80]} (an error this client version does not know): {facts[:200]!r}")
    try:
        return rebuild(known, msgspec.msgpack.decode(facts))
    except Exception as error:
        # Facts of any type may come, and each error formats its own.
        return InternalError(what=f"{name}, whose facts make none ({error!r}): {facts[:200]!r}")
