"""What goes wrong between workers, as errors.

    DataPlaneError
    ├── NotFoundError (KeyError)
    │   └── NameNotFoundError           nobody registered the name within the wait
    ├── BadRequestError (ValueError)
    │   ├── NameInUseError              a live group, worker or channel has the name
    │   ├── MessageMismatchError        send met by recv_tensor, or another shape, dtype or form
    │   ├── MessageBacklogError         too much was sent that nobody received
    │   ├── GroupOptionsError           the two ends made first contact with different options
    │   ├── NoSuchRankError (IndexError)    a group was asked for a rank that it has not
    │   ├── GroupEndedError             a call on a group that has ended
    │   └── MessengerClosedError        this worker's messages were closed
    ├── NotSerializableError (TypeError)    an object that cannot be sent
    ├── WorkerCallError (RuntimeError)  a worker raised what cannot be brought here; its type and message
    │   └── WorkerExitError             a worker's method tried to end its process
    ├── WaitTimeoutError (TimeoutError)
    │   ├── CallWaitTimeoutError        a call on a group was waited for, and not for as long as it takes
    │   ├── DeviceLockTimeoutError      another worker held the same accelerators for too long
    │   └── MessageTimeoutError         nothing came, or was taken, in time
    └── ServiceError (ConnectionError)
        ├── WorkerLostError             a worker's process died, or its group ended, while somebody needed it
        ├── DirectoryLostError          the job's directory does not answer
        ├── OpenFilesError              this process may have no more open files
        └── SourceFailedError           the source of a broadcast could not send

They carry their facts as attributes and pickle, as all errors of `dataplane.errors` do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from dataplane.errors import BadRequestError, DataPlaneError, NotFoundError, ServiceError, WaitTimeoutError
from dataplane.protocol.fd_limits import enough_or


class NameNotFoundError(NotFoundError):
    def __init__(self, *, kind: str, name: str, waited_s: float) -> None:
        super().__init__(
            f"no {kind} named {name!r} was registered within {waited_s:.1f} s; was it launched, and under this name?",
            kind=kind,
            name=name,
            waited_s=waited_s,
        )


class NameInUseError(BadRequestError):
    def __init__(self, *, kind: str, name: str) -> None:
        super().__init__(
            f"the {kind} name {name!r} is in use; end the one that has it, or take another name", kind=kind, name=name
        )


class MessageMismatchError(BadRequestError):
    """sender, receiver: worker names; sent, expected: what each end named."""

    def __init__(self, *, sender: str, receiver: str, sent: str, expected: str) -> None:
        super().__init__(
            f"{sender} sent {sent}, but {receiver} expected {expected}; the message was dropped and nothing was "
            "written. Pair send with recv and send_tensor with recv_tensor of the same shape and dtype.",
            sender=sender,
            receiver=receiver,
            sent=sent,
            expected=expected,
        )


class GroupOptionsError(BadRequestError):
    def __init__(self, *, worker: str, peer: str, ours: str, theirs: str) -> None:
        super().__init__(
            f"{worker} made first contact with {peer} under options {ours}, {peer} under {theirs}; give both ends the "
            "same CollectiveGroupOptions",
            worker=worker,
            peer=peer,
            ours=ours,
            theirs=theirs,
        )


class NoSuchRankError(BadRequestError, IndexError):
    def __init__(self, *, group: str, rank: object, size: int) -> None:
        super().__init__(
            f"rank {rank!r} of worker group {group!r} was named; it has {size} workers, counted from 0",
            group=group,
            rank=rank,
            size=size,
        )


class GroupEndedError(BadRequestError):
    def __init__(self, *, group: str) -> None:
        super().__init__(f"worker group {group!r} has ended: it has no workers to call", group=group)


class MessageBacklogError(BadRequestError):
    """Sizes in bytes."""

    def __init__(self, *, what: str, nbytes: int, waiting_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{what}: {nbytes:,} bytes, beside the {waiting_bytes:,} that were sent but not received yet, are more "
            f"than the {limit_bytes:,} that this worker keeps. Let the receivers catch up.",
            what=what,
            nbytes=nbytes,
            waiting_bytes=waiting_bytes,
            limit_bytes=limit_bytes,
        )


class MessengerClosedError(BadRequestError):
    def __init__(self, *, worker: str) -> None:
        super().__init__(f"the messages of worker {worker} were closed", worker=worker)


class NotSerializableError(DataPlaneError, TypeError):
    """verb: what cannot be done with it, "sent" or "loaded"."""

    def __init__(self, *, what: str, why: str, verb: str = "sent") -> None:
        super().__init__(f"{what} cannot be {verb}: {why}", what=what, why=why, verb=verb)


class WorkerCallError(DataPlaneError, RuntimeError):
    def __init__(self, *, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}", kind=kind, message=message)


class WorkerExitError(WorkerCallError):
    """The worker lives on: failures of this kind are caught in it."""


class CallWaitTimeoutError(WaitTimeoutError):
    def __init__(self, *, what: str, waited_s: float) -> None:
        super().__init__(f"{what}: not done within {waited_s:.1f} s; it goes on", what=what, waited_s=waited_s)


class DeviceLockTimeoutError(WaitTimeoutError):
    """holder: the worker that holds it, as far as that is known."""

    def __init__(self, *, worker: str, device: str, holder: str, waited_s: float) -> None:
        super().__init__(
            f"worker {worker} waited {waited_s:.1f} s for accelerator {device}, which {holder} holds; "
            "let that one release its device_lock, or wait longer",
            worker=worker,
            device=device,
            holder=holder,
            waited_s=waited_s,
        )


class MessageTimeoutError(WaitTimeoutError):
    def __init__(self, *, what: str, waited_s: float) -> None:
        super().__init__(f"{what}: not within {waited_s:.1f} s", what=what, waited_s=waited_s)


class WorkerLostError(ServiceError):
    def __init__(self, *, worker: str, why: str) -> None:
        super().__init__(f"{worker} is gone: {why}", worker=worker, why=why)


class DirectoryLostError(ServiceError):
    def __init__(self, *, address: str, why: str) -> None:
        super().__init__(f"no answer from the job's directory at {address}: {why}", address=address, why=why)


class OpenFilesError(ServiceError):
    def __init__(self, *, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}; allow it more", what=what, why=why)

    @classmethod
    def of(cls, what: str, *, least: int = 0) -> AbstractContextManager[None]:
        """This error, of `what`, in place of one of the system's or of ZMQ's that says the same; and where, to begin
        with, fewer than `least` are left."""
        return enough_or(lambda why: cls(what=what, why=why), least=least)


class SourceFailedError(ServiceError):
    def __init__(self, *, source: str, why: str) -> None:
        super().__init__(f"{source}, the source of a broadcast, failed: {why}", source=source, why=why)
