"""The errors of workers, worker groups, messages and channels.

    DataPlaneError
    ├── NotFoundError (KeyError)
    │   └── NameNotFoundError           the name was not registered within the wait
    ├── BadRequestError (ValueError)
    │   ├── NameInUseError              a running group, worker or channel has the name
    │   ├── MessageMismatchError        send met recv_tensor, or shape, dtype or structure differ
    │   ├── MessageBacklogError         sent messages that were not received exceed the limit
    │   ├── GroupOptionsError           the two ends made first contact with different options
    │   ├── NoSuchRankError (IndexError)    the group does not have this rank
    │   ├── GroupEndedError             a call on a group that has ended
    │   └── MessengerClosedError        this worker's messenger was closed
    ├── NotSerializableError (TypeError)    an object that cannot be sent
    ├── WorkerCallError (RuntimeError)  a worker's exception that cannot be unpickled here; its type and message
    │   └── WorkerExitError             a worker's method tried to exit its process
    ├── WaitTimeoutError (TimeoutError)
    │   ├── CallWaitTimeoutError        a wait for a call on a group timed out; the call continues
    │   ├── DeviceLockTimeoutError      another worker held the same accelerators for too long
    │   └── MessageTimeoutError         no message was received, or taken by the receiver, in time
    └── ServiceError (ConnectionError)
        ├── WorkerLostError             a worker's process or group ended during an operation
        ├── DirectoryLostError          the job's directory does not respond
        ├── OpenFilesError              this process reached its limit of open files
        ├── DeviceTransferError         the tensors of a message did not reach the receiver's device
        └── SourceFailedError           the source of a broadcast could not send

They carry their facts as attributes and can be pickled, like all errors of `dataplane.errors`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar, dataclass_transform

from dataplane.errors import BadRequestError, DataPlaneError, NotFoundError, ServiceError, WaitTimeoutError
from dataplane.protocol.fd_limits import enough_or

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, eq_default=False)
def declared(cls: type[T]) -> type[T]:
    """Decorate an error class whose fields are its facts. They become keyword arguments and attributes."""
    return dataclass(kw_only=True, eq=False, repr=False)(cls)


class DeclaredError(DataPlaneError):
    """An error with the message `text`, a format string of its facts."""

    text: ClassVar[str]

    def __post_init__(self) -> None:
        facts = {fact.name: getattr(self, fact.name) for fact in fields(self)}  # type: ignore[arg-type]
        super().__init__(self.text.format(**facts), **facts)


@declared
class NameNotFoundError(DeclaredError, NotFoundError):
    kind: str
    name: str
    waited_s: float
    text = (
        "no {kind} named {name!r} was registered within {waited_s:.1f} s; check that it was "
        "started with this name in the same job, or wait longer"
    )


@declared
class NameInUseError(DeclaredError, BadRequestError):
    kind: str
    name: str
    text = "the {kind} name {name!r} is in use in this job; end the {kind} that has it, or choose another name"


@declared
class MessageMismatchError(DeclaredError, BadRequestError):
    """sender, receiver: worker names. sent, expected: descriptions of the message at each end."""

    sender: str
    receiver: str
    sent: str
    expected: str
    text = (
        "{sender} sent {sent}, but {receiver} expected {expected}; the message was dropped, and "
        "nothing was written. Pair send with recv and send_tensor with recv_tensor of the same "
        "shape and dtype."
    )


@declared
class GroupOptionsError(DeclaredError, BadRequestError):
    worker: str
    peer: str
    ours: str
    theirs: str
    text = (
        "{worker} and {peer} exchange messages with different options: {worker} with {ours}, "
        "{peer} with {theirs}; pass the same CollectiveGroupOptions at both ends"
    )


@declared
class NoSuchRankError(DeclaredError, BadRequestError, IndexError):
    group: str
    rank: object
    size: int
    text = "rank {rank!r} of worker group {group!r} does not exist; it has {size} workers, counted from 0"


@declared
class GroupEndedError(DeclaredError, BadRequestError):
    group: str
    text = "worker group {group!r} has ended and has no workers to call; launch it again"


@declared
class MessageBacklogError(DeclaredError, BadRequestError):
    """Sizes in bytes."""

    what: str
    nbytes: int
    waiting_bytes: int
    limit_bytes: int
    text = (
        "{what}: {nbytes:,} bytes, in addition to {waiting_bytes:,} bytes sent but not received "
        "yet, exceed this worker's limit of {limit_bytes:,} bytes. Send again when the receivers "
        "have received some of them."
    )


@declared
class MessengerClosedError(DeclaredError, BadRequestError):
    worker: str
    text = (
        "worker {worker} can no longer send or receive messages, because it has ended or is "
        "ending; complete its messages before that, or launch it again"
    )


@declared
class NotSerializableError(DeclaredError, TypeError):
    """verb: the operation that failed, "sent" or "loaded"."""

    what: str
    why: str
    verb: str = "sent"
    text = "{what} cannot be {verb}: {why}"


@declared
class WorkerCallError(DeclaredError, RuntimeError):
    kind: str
    message: str
    text = "{kind}: {message}"


class WorkerExitError(WorkerCallError):
    """The worker keeps running: it catches attempts of its methods to exit."""


@declared
class CallWaitTimeoutError(DeclaredError, WaitTimeoutError):
    what: str
    waited_s: float
    text = "{what}: not done within {waited_s:.1f} s; the call continues, so you can wait for it again"


@declared
class DeviceLockTimeoutError(DeclaredError, WaitTimeoutError):
    """holder: the worker that holds the lock, or a description if its name is unknown; waited_s: for all accelerators
    of the lock."""

    worker: str
    device: str
    holder: str
    waited_s: float
    text = (
        "worker {worker} waited {waited_s:.1f} s for its accelerators, last for accelerator "
        "{device}, which {holder} holds; release that worker's device_lock, or wait longer"
    )


@declared
class MessageTimeoutError(DeclaredError, WaitTimeoutError):
    what: str
    waited_s: float
    text = (
        "{what}: not done within {waited_s:.1f} s; check that the other end is running and makes "
        "the matching call, or wait longer"
    )


@declared
class WorkerLostError(DeclaredError, ServiceError):
    worker: str
    why: str
    text = "{worker} is gone: {why}"


@declared
class DirectoryLostError(DeclaredError, ServiceError):
    address: str
    why: str
    text = (
        "no answer from the job's directory of names at {address}: {why}. Check that the process "
        "that started the job still runs."
    )


@declared
class OpenFilesError(DeclaredError, ServiceError):
    what: str
    why: str
    text = "{what}: {why}; raise the limit of open files (ulimit -n)"

    @classmethod
    def of(cls, what: str, *, least: int = 0) -> AbstractContextManager[None]:
        """Return a context that converts the system's or ZMQ's error about open files to this error, about `what`, and
        raises it on entry if fewer than `least` file descriptors are left."""
        return enough_or(lambda why: cls(what=what, why=why), least=least)


@declared
class SourceFailedError(DeclaredError, ServiceError):
    source: str
    why: str
    text = "{source}, the source of a broadcast, failed: {why}"


@declared
class DeviceTransferError(DeclaredError, ServiceError):
    what: str
    why: str
    text = (
        "{what}: the tensors were not transferred to the receiver's device: {why}; send again, or "
        "set TQ_COLLECTIVES=never to send tensors through host memory"
    )
