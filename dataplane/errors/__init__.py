"""All error classes of this package, and their encoding for transfer between processes.

    DataPlaneError
    ├── NotFoundError (KeyError)
    │   ├── PartitionNotFoundError      the partition is not registered
    │   ├── TaskNotFoundError           the partition has no such consumer task
    │   ├── FieldNotFoundError          the field is neither declared nor produced
    │   ├── SampleNotFoundError         no live sample has the id
    │   ├── FieldNotProducedError       the sample exists, but the field was never written for it
    │   └── StaleSampleError            the referenced sample was cleared; a newer sample may have its id
    ├── BadRequestError (ValueError)
    │   ├── SampleExistsError           mode="create" with ids that already exist
    │   ├── PartitionExistsError        restore of a partition that already exists
    │   ├── CheckpointError             a checkpoint is damaged, incomplete or of another version; names the file
    │   ├── SchemaError                 kind, dtype or inner shape differs from the field's
    │   ├── StaleSchemaError            a put was encoded with an outdated schema
    │   ├── InvalidRequestError         duplicates, wrong counts, malformed arguments
    │   ├── RowsChangedError            another writer changed the rows during an append
    │   ├── ShareConflictError          a rank's share of a step was returned and claimed by another claim
    │   ├── PartitionSealedError        new ids in a sealed partition
    │   ├── PartitionDroppedError       the partition was dropped while a call waited on it
    │   ├── RequestTooLargeError        the request can never fit, even in an empty service
    │   ├── LimitError                  a count exceeds a limit of the service; names count and limit
    │   ├── StaleCallError              a call id that the session has already settled
    │   ├── ClientClosedError           the client was closed (by `close` or in a forked child)
    │   ├── ReentrantCallError          a signal handler or finalizer called the client whose call it interrupts
    │   └── RolloutAbortedError         a replay buffer no longer accepts the produced samples
    ├── UnsupportedValueError (TypeError)   a value that no column can hold
    ├── WaitTimeoutError (TimeoutError)
    │   ├── CapacityTimeoutError        no space became free in time; names the holders of the space
    │   ├── ClaimTimeoutError           too few samples became claimable in time; names what is missing
    │   └── CallTimeoutError            no response in time
    ├── ServiceError (ConnectionError)
    │   ├── ServiceUnavailableError     the service does not respond at the address
    │   ├── AuthenticationError         token missing or wrong
    │   ├── ProtocolVersionError        client and controller have different protocol versions; names both
    │   ├── SessionExpiredError         the service ended this session
    │   ├── SessionInterruptedError     an interrupt of a call ended this session
    │   ├── ServiceRestartedError       the service runs in another epoch
    │   ├── StorageUnitError            a storage unit rejected the request or is unreachable
    │   └── CallCancelledError          the call was cancelled before it took effect
    ├── ChecksumError (OSError)         read bytes differ from written bytes; names sample, field and unit
    ├── PortTakenError (OSError)        a listening port is in use; names the process, if known
    ├── ArenaSpaceError (OSError)       the file system or cgroup has too little memory for the arena
    ├── DrainError (RuntimeError)       a storage unit could not be emptied; names the remaining data and the cause
    ├── StateDirError (OSError)         the service's state directory cannot be used, read or written
    ├── CheckpointWriteError (OSError)  the file system rejected a checkpoint; names file and cause
    └── InternalError (RuntimeError)    a defect of the service; the service log has the command

The facts of an error are attributes, named like the keywords of its constructor. `to_wire` and `from_wire` transfer an
error between processes without pickle. Errors can be pickled too, because Ray transfers exceptions with pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dataplane.errors.base import *
from dataplane.errors.base import SHOWN, DataPlaneError, first_few, named, rebuild
from dataplane.errors.service import *
from dataplane.errors.service import InternalError

# --- rejected requests: the caller's mistake ------------------------------------------------------------------


class BadRequestError(DataPlaneError, ValueError):
    """The service rejected the request; nothing changed."""

    grpc_status = "INVALID_ARGUMENT"


class SampleExistsError(BadRequestError):
    """A put with mode "create" names samples that exist. `total`: their number, if `samples` has only the first few."""

    grpc_status = "ALREADY_EXISTS"

    def __init__(self, *, partition: str, samples: Sequence[str], total: int | None = None) -> None:
        super().__init__(
            f"sample {first_few(samples, total)} already exists in partition {partition!r}; "
            "mode='create' only creates new samples (use mode='upsert', or clear the samples first)",
            partition=partition,
            **named(samples, total),
        )


class PartitionExistsError(BadRequestError):
    """A restored partition exists in the service."""

    grpc_status = "ALREADY_EXISTS"

    def __init__(self, *, partition: str) -> None:
        super().__init__(
            f"partition {partition!r} already exists; clear it, restore only other partitions (partitions=), or "
            "replace it (replace=True)",
            partition=partition,
        )


class CheckpointError(BadRequestError):
    """A checkpoint cannot be used. `file` is the invalid path, `why` the cause. Nothing was restored or written."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, file: str, why: str) -> None:
        super().__init__(f"checkpoint {file}: {why}", file=file, why=why)


UNDECLARED = "an undeclared field"
"""Value of `got` in the `SchemaError` for a field that is not declared in a strict schema."""


class SchemaError(BadRequestError):
    """The values of a put do not match the field's schema or its live rows. `hint` replaces the usual remedy."""

    def __init__(self, *, partition: str, field: str, got: str, expected: str, hint: str = "") -> None:
        remedy = hint or "Convert the values, clear the field's live rows, or register the partition with a new schema."
        super().__init__(
            f"field {field!r} of partition {partition!r}: got {got}, expected {expected}. {remedy}",
            partition=partition,
            field=field,
            got=got,
            expected=expected,
            hint=hint,
        )


class StaleSchemaError(BadRequestError):
    """A column was encoded as the kind in the schema that its writer had read, but the schema has no kind now."""

    grpc_status = "ABORTED"

    def __init__(self, *, partition: str, field: str) -> None:
        super().__init__(
            f"field {field!r} of partition {partition!r} was encoded with an outdated schema: the field was cleared or "
            "registered again, and its kind is undecided now. Nothing was stored. Retry the put; if the error "
            "persists, declare the field's kind in register_partition.",
            partition=partition,
            field=field,
        )


class InvalidRequestError(BadRequestError):
    def __init__(self, message: str) -> None:
        super().__init__(message, message=message)


class RowsChangedError(BadRequestError):
    """Rows changed after a writer had read them for an append. `total`: their number, if `samples` has only the first
    few."""

    grpc_status = "ABORTED"

    def __init__(self, *, partition: str, field: str, samples: Sequence[str], total: int | None = None) -> None:
        super().__init__(
            f"field {field!r} of sample {first_few(samples, total)} (partition {partition!r}) was written by another "
            "client during the append; nothing was appended. Repeat the append, and let only one client at a time "
            "write to a sample.",
            partition=partition,
            field=field,
            **named(samples, total),
        )


class ShareConflictError(BadRequestError):
    """Part of a rank's share was returned to the pool (its hold or lease ended, or its claim was given back) and then
    claimed by another claim. `total`: their number, if `samples` has only the first few."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(
        self, *, partition: str, task: str, step: int, rank: int, samples: Sequence[str], total: int | None = None
    ) -> None:
        super().__init__(
            f"sample {first_few(samples, total)} of rank {rank}'s share of step {step} of task {task!r} (partition "
            f"{partition!r}) is no longer reserved for this rank, and another claim holds it now: the share was not "
            "claimed in time, its lease ended, or its claim was given back. Continue with the next step; to avoid "
            "this, claim the share earlier, or use a longer lease_s.",
            partition=partition,
            task=task,
            step=step,
            rank=rank,
            **named(samples, total),
        )


class PartitionSealedError(BadRequestError):
    """A put has new sample ids for a sealed partition. `total`: their number, if `samples` has only the first few."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, partition: str, samples: Sequence[str], total: int | None = None) -> None:
        super().__init__(
            f"partition {partition!r} is sealed and accepts no new samples: {first_few(samples, total)}. "
            "Register the partition again to lift the seal.",
            partition=partition,
            **named(samples, total),
        )


class PartitionDroppedError(BadRequestError):
    """The partition was dropped while a call waited on it. `waiting` describes the call."""

    grpc_status = "ABORTED"

    def __init__(self, *, partition: str, waiting: str) -> None:
        super().__init__(
            f"partition {partition!r} was cleared or replaced while {waiting} waited on it. Register it again to use "
            "it.",
            partition=partition,
            waiting=waiting,
        )


class RequestTooLargeError(BadRequestError):
    """The request can never fit, even into an empty service. `hint` replaces the usual remedy."""

    grpc_status = "OUT_OF_RANGE"

    def __init__(self, *, wanted_bytes: int, limit_bytes: int, what: str, hint: str = "") -> None:
        remedy = hint or "Put fewer rows at a time or start the service with a larger --capacity."
        super().__init__(
            f"{what} needs {wanted_bytes:,} bytes, more than the maximum of {limit_bytes:,}. {remedy}",
            wanted_bytes=wanted_bytes,
            limit_bytes=limit_bytes,
            what=what,
            hint=hint,
        )


class LimitError(BadRequestError):
    """The count `got` of `what` exceeds `limit`. `hint` is the remedy."""

    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, *, what: str, got: int, limit: int, hint: str) -> None:
        super().__init__(
            f"{what}: {got:,}, and the limit is {limit:,}. {hint}", what=what, got=got, limit=limit, hint=hint
        )


class StaleCallError(BadRequestError):
    """The session has settled a call with this id before, like all calls below its `watermark`."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, session: int, call_id: int, watermark: int) -> None:
        super().__init__(
            f"call {call_id} of session {session} is not executed: it was already answered or cancelled, "
            f"like all calls below {watermark}",
            session=session,
            call_id=call_id,
            watermark=watermark,
        )


class ReentrantCallError(BadRequestError):
    """A signal handler, a finalizer or a callback of a client made a call of the client whose call it interrupted."""

    def __init__(self) -> None:
        super().__init__(
            "this call interrupts another call of the same client in this thread: it is made by a signal handler, a "
            "finalizer (`__del__`) or a callback. Make it after that call has returned, or use another client."
        )


class ClientClosedError(BadRequestError):
    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, why: str = "close() was called; create a new client") -> None:
        super().__init__(f"this client cannot execute the call: {why}", why=why)


class RolloutAbortedError(BadRequestError):
    """A replay buffer does not accept the samples of a reservation."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, samples: Sequence[str], why: str) -> None:
        names = list(samples)
        super().__init__(f"samples {first_few(names)} are no longer accepted: {why}", samples=names, why=why)


# --- wrong kind of value --------------------------------------------------------------------------------------


_DESCRIPTIONS = ("argument ", "tag ", "a stored value", "a list of a ")
"""Beginnings of what is not the name of a field."""


class UnsupportedValueError(DataPlaneError, TypeError):
    """No column kind can hold the value. Names row (or None), type, and the field, or an argument or tag as in
    "argument tags" and "tag lang"."""

    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, *, field: str, row: int | None, got: str, hint: str) -> None:
        name = field if field.startswith(_DESCRIPTIONS) else f"field {field!r}"
        where = name if row is None else f"{name}, row {row}"
        super().__init__(f"{where}: {got} is not supported here. {hint}", field=field, row=row, got=got, hint=hint)


# --- timeouts -------------------------------------------------------------------------------------------------


class WaitTimeoutError(DataPlaneError, TimeoutError):
    """A wait reached its deadline; nothing was claimed or changed."""

    grpc_status = "DEADLINE_EXCEEDED"


class CapacityTimeoutError(WaitTimeoutError):
    """A put found no space in time. `holders` are the first few (holder, bytes) pairs, largest first: partitions, then
    reservations and pins by session. With `budget_bytes`, the exhausted space is that budget of `partition`. `arena`
    is the reason why an arena could not grow. With `fragments`, enough bytes are free, but in that number of pieces of
    at most `largest_free_bytes`. `behind` names the earlier put that this one had to wait for in line."""

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
        held = "; ".join(f"{holder} holds {size:,}" for holder, size in holders[:SHOWN]) or "no space is held"
        # The texts that follow the number of free bytes, and "Clear consumed samples, or".
        free = "available to this put"
        alternative = "start the service with a larger --capacity"
        if budget_bytes is not None:
            free += f" of the {budget_bytes:,} in the budget of partition {partition!r}"
            alternative = "register the partition with a larger budget_bytes"
        if fragments:
            free += f", but fragmented: {fragments:,} pieces of at most {largest_free_bytes:,}"
            alternative = f"put smaller samples, or {alternative}"
        if behind:
            free += f", but queued behind {behind}, which has no space yet; puts are served in order"
            alternative = f"{alternative}, so that the earlier put finds space, or cancel that put"
        if arena:
            remedy = f"{arena.rstrip('.')}. Fix the cause, or clear consumed samples."
        else:
            remedy = f"Clear consumed samples, or {alternative}."
        super().__init__(
            f"no space for {wanted_bytes:,} bytes within {waited_s:.1f} s ({free_bytes:,} {free}): {held}. {remedy}",
            wanted_bytes=wanted_bytes,
            free_bytes=free_bytes,
            waited_s=waited_s,
            holders=[(holder, int(size)) for holder, size in holders[:SHOWN]],
            partition=partition,
            budget_bytes=budget_bytes,
            arena=arena,
            fragments=fragments,
            largest_free_bytes=largest_free_bytes,
            behind=behind,
        )


class ClaimTimeoutError(WaitTimeoutError):
    """Only `ready` of the `wanted` samples were claimable in time; `why` says what was missing. The facts behind `why`
    are attributes too, named as in the result of `DataPlaneClient.why_blocked` (except `ready`); `writers` are dicts.
    """

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
    """`peer` did not respond in time to `what`, a command or a request. With a `hint` (what to do),
    `peer` is work of this process that did not end in time."""

    def __init__(self, *, what: str, waited_s: float, peer: str, hint: str = "") -> None:
        missing = f"{peer} did not end" if hint else f"no response from {peer}"
        remedy = hint or "The process may be stopped, busy or unreachable; see its log."
        super().__init__(
            f"{what}: {missing} within {waited_s:.1f} s. {remedy}",
            what=what,
            waited_s=waited_s,
            peer=peer,
            hint=hint,
        )


# --- the wire -------------------------------------------------------------------------------------------------


def _leaf_classes(cls: type[DataPlaneError]) -> list[type[DataPlaneError]]:
    """Return the classes below `cls`, or `cls` itself, that have no subclass."""
    leaves = [leaf for subclass in cls.__subclasses__() for leaf in _leaf_classes(subclass)]
    return leaves if leaves else [cls]


ERROR_TYPES: dict[str, type[DataPlaneError]] = {leaf.__name__: leaf for leaf in _leaf_classes(DataPlaneError)}
"""The errors that processes send to each other, by name."""


def to_wire(error: DataPlaneError) -> tuple[str, bytes]:
    """Return (class name, msgpack of the facts)."""
    return type(error).__name__, msgspec.msgpack.encode(error.facts)


def from_wire(name: str, facts: bytes) -> DataPlaneError:
    """Decode an error that `to_wire` encoded. An unknown class name, or facts that do not fit the class, give an
    `InternalError` that contains them."""
    cls = ERROR_TYPES.get(name)
    if cls is None:
        return InternalError(
            what=f"the service sent an error of the unknown class {name[:80]} with the facts {facts[:200]!r} (its "
            "version may be newer than that of this client)"
        )
    try:
        return rebuild(cls, msgspec.msgpack.decode(facts))
    except Exception as error:
        # Facts of any type may arrive, and each error class formats its own.
        return InternalError(what=f"the service sent the error {name} with invalid facts {facts[:200]!r} ({error!r})")
