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
        └── SourceFailedError           the source of a broadcast could not send

They carry their facts as attributes and can be pickled, like all errors of `dataplane.errors`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from dataplane.errors import BadRequestError, DataPlaneError, NotFoundError, ServiceError, WaitTimeoutError
from dataplane.protocol.fd_limits import enough_or


class NameNotFoundError(NotFoundError):
    def __init__(self, *, kind: str, name: str, waited_s: float) -> None:
        super().__init__(
            f"no {kind} named {name!r} was registered within {waited_s:.1f} s; check that it was started with this "
            "name in the same job, or wait longer",
            kind=kind,
            name=name,
            waited_s=waited_s,
        )


class NameInUseError(BadRequestError):
    def __init__(self, *, kind: str, name: str) -> None:
        super().__init__(
            f"the {kind} name {name!r} is in use in this job; end the {kind} that has it, or choose another name",
            kind=kind,
            name=name,
        )


class MessageMismatchError(BadRequestError):
    """sender, receiver: worker names. sent, expected: descriptions of the message at each end."""

    def __init__(self, *, sender: str, receiver: str, sent: str, expected: str) -> None:
        super().__init__(
            f"{sender} sent {sent}, but {receiver} expected {expected}; the message was dropped, and nothing was "
            "written. Pair send with recv and send_tensor with recv_tensor of the same shape and dtype.",
            sender=sender,
            receiver=receiver,
            sent=sent,
            expected=expected,
        )


class GroupOptionsError(BadRequestError):
    def __init__(self, *, worker: str, peer: str, ours: str, theirs: str) -> None:
        super().__init__(
            f"{worker} and {peer} exchange messages with different options: {worker} with {ours}, {peer} with "
            f"{theirs}; pass the same CollectiveGroupOptions at both ends",
            worker=worker,
            peer=peer,
            ours=ours,
            theirs=theirs,
        )


class NoSuchRankError(BadRequestError, IndexError):
    def __init__(self, *, group: str, rank: object, size: int) -> None:
        super().__init__(
            f"rank {rank!r} of worker group {group!r} does not exist; it has {size} workers, counted from 0",
            group=group,
            rank=rank,
            size=size,
        )


class GroupEndedError(BadRequestError):
    def __init__(self, *, group: str) -> None:
        super().__init__(f"worker group {group!r} has ended and has no workers to call; launch it again", group=group)


class MessageBacklogError(BadRequestError):
    """Sizes in bytes."""

    def __init__(self, *, what: str, nbytes: int, waiting_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{what}: {nbytes:,} bytes, in addition to {waiting_bytes:,} bytes sent but not received yet, exceed this "
            f"worker's limit of {limit_bytes:,} bytes. Send again when the receivers have received some of them.",
            what=what,
            nbytes=nbytes,
            waiting_bytes=waiting_bytes,
            limit_bytes=limit_bytes,
        )


class MessengerClosedError(BadRequestError):
    def __init__(self, *, worker: str) -> None:
        super().__init__(
            f"worker {worker} can no longer send or receive messages, because it has ended or is ending; complete its "
            "messages before that, or launch it again",
            worker=worker,
        )


class NotSerializableError(DataPlaneError, TypeError):
    """verb: the operation that failed, "sent" or "loaded"."""

    def __init__(self, *, what: str, why: str, verb: str = "sent") -> None:
        super().__init__(f"{what} cannot be {verb}: {why}", what=what, why=why, verb=verb)


class WorkerCallError(DataPlaneError, RuntimeError):
    def __init__(self, *, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}", kind=kind, message=message)


class WorkerExitError(WorkerCallError):
    """The worker keeps running: it catches attempts of its methods to exit."""


class CallWaitTimeoutError(WaitTimeoutError):
    def __init__(self, *, what: str, waited_s: float) -> None:
        super().__init__(
            f"{what}: not done within {waited_s:.1f} s; the call continues, so you can wait for it again",
            what=what,
            waited_s=waited_s,
        )


class DeviceLockTimeoutError(WaitTimeoutError):
    """holder: the worker that holds the lock, or a description if its name is unknown; waited_s: for all accelerators
    of the lock."""

    def __init__(self, *, worker: str, device: str, holder: str, waited_s: float) -> None:
        super().__init__(
            f"worker {worker} waited {waited_s:.1f} s for its accelerators, last for accelerator {device}, which "
            f"{holder} holds; release that worker's device_lock, or wait longer",
            worker=worker,
            device=device,
            holder=holder,
            waited_s=waited_s,
        )


class MessageTimeoutError(WaitTimeoutError):
    def __init__(self, *, what: str, waited_s: float) -> None:
        super().__init__(
            f"{what}: not done within {waited_s:.1f} s; check that the other end is running and makes the matching "
            "call, or wait longer",
            what=what,
            waited_s=waited_s,
        )


class WorkerLostError(ServiceError):
    def __init__(self, *, worker: str, why: str) -> None:
        super().__init__(f"{worker} is gone: {why}", worker=worker, why=why)


class DirectoryLostError(ServiceError):
    def __init__(self, *, address: str, why: str) -> None:
        super().__init__(
            f"no answer from the job's directory of names at {address}: {why}. Check that the process that started "
            "the job still runs.",
            address=address,
            why=why,
        )


class OpenFilesError(ServiceError):
    def __init__(self, *, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}; raise the limit of open files (ulimit -n)", what=what, why=why)

    @classmethod
    def of(cls, what: str, *, least: int = 0) -> AbstractContextManager[None]:
        """Return a context that converts the system's or ZMQ's error about open files to this error, about `what`, and
        raises it on entry if fewer than `least` file descriptors are left."""
        return enough_or(lambda why: cls(what=what, why=why), least=least)


class SourceFailedError(ServiceError):
    def __init__(self, *, source: str, why: str) -> None:
        super().__init__(f"{source}, the source of a broadcast, failed: {why}", source=source, why=why)
