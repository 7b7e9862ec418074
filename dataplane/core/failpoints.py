"""Failpoints: named places in the code where a test can stop, delay or kill a process. Without tests they are not armed
and cost nothing.

A process arms its own failpoints: `arm("put.before_commit", action)`. The action runs in the thread that reaches the
failpoint.
"""

from __future__ import annotations

from collections.abc import Callable

NAMES = frozenset(
    {
        # A client: its session, puts, gets, streams.
        "session.before_open",
        "session.opened",
        "session.found",
        "attach.before_proof",
        "attach.proven",
        "call.*.before",
        "call.*.after",
        "put.mid_copy",
        "put.before_commit",
        "move.mid_copy",
        "move.before_switch",
        "get.mid_copy",
        "get.copied",
        "get.before_release",
        "bulk.write.between_frames",
        "bulk.read.between_frames",
        "stream.claimed",
        "stream.read",
        "stream.handed_out",
        # A client: checkpoints.
        "checkpoint.saved",
        "checkpoint.file_written",
        "checkpoint.before_rename",
        "checkpoint.between_renames",
        "checkpoint.after_rename",
        "restore.verified",
        "restore.stored",
        "restore.before_publish",
        # A storage unit.
        "unit.reserved",
        "unit.adopted",
        "unit.before_add",
        "unit.record.before_rename",
        "unit.start_over",
        "unit.report.before",
        "unit.report.after",
        "unit.attach",
        "unit.attached",
        "unit.write.between_frames",
        "unit.read.copied",
        "unit.fence.before",
        "unit.fence.after",
        "unit.before_grown",
        # The controller.
        "journal.before_append",
        "journal.appended",
        "journal.after_append",
        "journal.applied",
        "journal.replaying",
        "journal.replayed",
        "journal.taken_over",
        "image.before_rename",
        "image.before_begin",
        "image.begun",
        "controller.bound",
        "controller.before_reply",
        "controller.before_opened",
        "controller.before_added",
        "controller.before_order",
        # A rank of a worker group.
        "fetch.between_header_and_payload",
    }
)
"""Names of all failpoints. `call.*.before` stands for `call.Commit.before` and the same name of every other command."""

armed: dict[str, Callable[[], None]] = {}
"""The action of each armed failpoint. Frequent code tests it before it calls `failpoint`."""


def failpoint(name: str) -> None:
    """Run the action that is armed at failpoint `name`, if any."""
    action = armed.get(name)
    if action is not None:
        action()


def general(name: str) -> str:
    """Return the entry of `NAMES` that stands for the failpoint `name`: "call.*.before" for "call.Commit.before", any
    other name itself."""
    words = name.split(".")
    return ".".join([words[0], "*", *words[2:]]) if words[0] == "call" else name


def arm(name: str, action: Callable[[], None]) -> None:
    """Run `action` whenever `failpoint(name)` is reached in this process. Raises ValueError for a name not in
    `NAMES`."""
    if general(name) not in NAMES:
        raise ValueError(f"unknown failpoint {name!r}; see dataplane.core.failpoints.NAMES")
    armed[name] = action


def disarm() -> None:
    """Disarm all failpoints."""
    armed.clear()
