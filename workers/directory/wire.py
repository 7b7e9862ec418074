"""Messages between a directory and its clients: msgpack of tagged structs, one per ZMQ message."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from dataplane.core.durations import seconds
from dataplane.errors import DataPlaneError
from workers.transport.encoding import carried, decoder

VERSION = 2
"""Increment it with every change of the messages in this file and in `workers.messages.wire`, and of the `Layout` of
`workers.transport.pickling`."""
Facts = dict[str, str | int | float | bool | list[str | int] | None]
"""Attributes of a name: small values of plain types."""


class Kind(enum.StrEnum):
    """The kind of a named object. Names are unique within their kind."""

    WORKER_GROUP = "group"
    WORKER = "worker"
    CHANNEL = "channel"


class EntryState(enum.StrEnum):
    """Whether an entry is live, or how it ended."""

    LIVE = "live"
    ENDED = "ended"
    """Ended by its owner or by a request."""
    LOST = "lost"
    """The process that owned it died or lost its connection."""


class DirectoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A registered name and its attributes.

    incarnation: greater than that of every earlier entry, so it distinguishes two entries with one name; endpoints:
    where to connect; why: the reason of its end, empty while it is live.
    """

    kind: Kind
    name: str
    incarnation: int
    state: EntryState = EntryState.LIVE
    endpoints: tuple[str, ...] = ()
    facts: Facts = {}
    why: str = ""

    @property
    def live(self) -> bool:
        return self.state is EntryState.LIVE


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a process. `host` identifies the boot of its kernel and its pid namespace."""

    host: str
    pid: int
    started: int


class OpenDirectory(msgspec.Struct, frozen=True, tag=True):
    """The first message on each connection. known: the directory has replied to this client before. The directory
    replies to requests of a client with another version with a `ProtocolVersionError`."""

    process: Process
    known: bool = False
    version: int = VERSION


class RegisterProcess(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """owned: the entry is lost when the process that registers it dies. returns: another process will then register
    the name again, replacing this entry if it is still live, and lookups wait for it meanwhile. A repeated request
    with the same id gets the same reply."""

    request_id: int
    kind: Kind
    name: str
    endpoints: tuple[str, ...]
    facts: Facts
    owned: bool
    returns: bool = False


class Lookup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A client that looks a name up is notified when the found entry ends. ValueError for a negative or infinite
    wait."""

    request_id: int
    kind: Kind
    name: str
    wait_s: float

    def __post_init__(self) -> None:
        seconds("wait_s", self.wait_s)


class End(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """incarnation: None for any. A no-op if there is no such live entry."""

    request_id: int
    kind: Kind
    name: str
    incarnation: int | None
    why: str


class Listing(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request all live entries of a kind."""

    request_id: int
    kind: Kind


class LeaveJob(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """End all entries that this session owns, and the session."""

    request_id: int


Question = RegisterProcess | Lookup | End | Listing | LeaveJob
"""Requests that get a reply."""
Request = OpenDirectory | Question


class Found(msgspec.Struct, frozen=True, tag=True):
    """The reply to a request that succeeded."""

    request_id: int
    entries: tuple[DirectoryEntry, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True):
    """error: the class name of an error of this package or of the data plane; facts: its keyword arguments."""

    request_id: int
    error: str
    facts: dict[str, Any]


class Gone(msgspec.Struct, frozen=True, tag=True):
    """A notification without a request: an entry that this client had found has ended or was lost."""

    entry: DirectoryEntry


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """The reply to the `OpenDirectory` of a client whose session the directory had dropped. The entries that it
    owned are lost, it watches nothing, and it has a new session from now on."""

    why: str


Reply = Found | Failed | Gone | Unknown

decode_request: Callable[[Any], Request] = decoder(Request)
decode_reply: Callable[[Any], Reply] = decoder(Reply)


def failed(request_id: int, error: DataPlaneError) -> Failed:
    return Failed(request_id, **carried(error))
