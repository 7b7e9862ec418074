"""What a directory and its clients say to each other: msgpack of tagged structs, one per ZMQ message."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from dataplane.core.durations import seconds
from dataplane.errors import DataPlaneError
from workers.transport.encoding import carried, decoder

VERSION = 1
"""Raised with every change of what is written here, in `workers.messages.wire` or in the `Layout` of
`workers.transport.pickling`."""
Facts = dict[str, str | int | float | bool | list[str | int] | None]
"""What else is known of a name: small and plain."""


class Kind(enum.StrEnum):
    """What a name stands for. Names are unique within their kind."""

    GROUP = "group"
    WORKER = "worker"
    CHANNEL = "channel"


class EntryState(enum.StrEnum):
    LIVE = "live"
    ENDED = "ended"
    """Closed by those who had it."""
    LOST = "lost"
    """The process that had it died."""


class DirectoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A name and what the directory knows of it.

    incarnation: greater than that of any entry made before it, so that two under one name differ; endpoints: where to
    reach it; why: how it ended, empty while it lives.
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
    """A process and what tells it from others: `host` is its kernel's boot and its pid namespace."""

    host: str
    pid: int
    started: int


class OpenDirectory(msgspec.Struct, frozen=True, tag=True):
    """Said first on each connection. known: the directory has answered this client before. A directory answers
    questions of another version with a `ProtocolVersionError`."""

    process: Process
    known: bool = False
    version: int = VERSION


class RegisterProcess(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """owned: the entry is lost when the process that registers it dies. returns: another process then registers the
    name again, over this one if need be, and whoever looks it up meanwhile waits. Said again under the same
    number, it has the same answer."""

    number: int
    kind: Kind
    name: str
    endpoints: tuple[str, ...]
    facts: Facts
    owned: bool
    returns: bool = False


class Lookup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Who looks a name up is told when what it found is gone. ValueError for a wait without an end."""

    number: int
    kind: Kind
    name: str
    wait_s: float

    def __post_init__(self) -> None:
        seconds("wait_s", self.wait_s)


class End(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """incarnation None: whichever lives. Ending what is not live changes nothing."""

    number: int
    kind: Kind
    name: str
    incarnation: int | None
    why: str


class Listing(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    number: int
    kind: Kind


class LeaveJob(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    number: int


Question = RegisterProcess | Lookup | End | Listing | LeaveJob
"""What is answered."""
Request = OpenDirectory | Question


class Found(msgspec.Struct, frozen=True, tag=True):
    """The answer to everything that succeeded."""

    number: int
    entries: tuple[DirectoryEntry, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True):
    """error: the name of one of this package's errors; facts: its keywords."""

    number: int
    error: str
    facts: dict[str, Any]


class Gone(msgspec.Struct, frozen=True, tag=True):
    """Unasked: an entry that this client had found has ended or was lost."""

    entry: DirectoryEntry


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """The answer to the `OpenDirectory` of a process that the directory had given up: what it had registered as its own
    is lost, and it watches nothing. It counts as a new one from now on."""

    why: str


Reply = Found | Failed | Gone | Unknown

decode_request: Callable[[Any], Request] = decoder(Request)
decode_reply: Callable[[Any], Reply] = decoder(Reply)


def failed(number: int, error: DataPlaneError) -> Failed:
    return Failed(number, **carried(error))
