"""What may happen to whom in a storm: every process dies and stops at every failpoint that it comes by, calls are
disturbed and cancelled there, and links break in every way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dataplane.core import failpoints
from tests.faults.acting import Order
from tests.faults.network import DISTURBANCES

PUT = ("put.before_commit", *(f"call.{name}.{when}" for name in ("Commit",) for when in ("before", "after")))
TAKE = (
    "get.mid_copy",
    "get.copied",
    "get.before_release",
    *(f"call.{name}.{when}" for name in ("Claim", "Locate", "Ack", "Clear") for when in ("before", "after")),
)
BEGIN = ("session.before_open", "session.opened")
ATTACH = ("attach.before_proof", "attach.proven")
ALLOCATE = ("call.Allocate.before", "call.Allocate.after")
PREALLOCATE = ("call.Preallocate.before", "call.Preallocate.after")
CLIENT_POINTS: dict[str, tuple[str, ...]] = {
    "producer-near": (*BEGIN, *ATTACH, *PREALLOCATE, "put.mid_copy", *PUT),
    "producer-far": ("session.opened", "session.found", *ALLOCATE, "bulk.write.between_frames", *PUT),
    "consumer-near": ("session.found", *TAKE),
    "consumer-far": ("attach.proven", "bulk.read.between_frames", *TAKE),
    "streamer": (
        "stream.claimed",
        "stream.read",
        "stream.handed_out",
        "call.Extend.before",
        "call.Extend.after",
        "call.Ack.before",
        "call.Ack.after",
    ),
    "saver": (
        *(
            f"call.{name}.{when}"
            for name in ("Save", "ReadSaved", "Stage", "Publish", "Register")
            for when in ("before", "after")
        ),
        "checkpoint.saved",
        "checkpoint.file_written",
        "checkpoint.before_rename",
        "checkpoint.between_renames",
        "checkpoint.after_rename",
        "restore.verified",
        "restore.stored",
        "restore.before_publish",
    ),
    "roamer": ("put.mid_copy", *PUT, *TAKE),
}
AT_START = frozenset((*BEGIN, *ATTACH))
CONTROLLER_AT_START = ("journal.replaying", "journal.replayed", "journal.taken_over", "controller.bound")
CONTROLLER_POINTS = (
    "journal.before_append",
    "journal.appended",
    "journal.after_append",
    "journal.applied",
    "image.before_rename",
    "image.before_begin",
    "image.begun",
    "controller.before_reply",
    "controller.before_opened",
    "controller.before_added",
    "controller.before_order",
)
UNIT_AT_START = ("unit.adopted", "unit.before_add", "unit.record.before_rename")
UNIT_POINTS = (
    "unit.report.before",
    "unit.report.after",
    "unit.attach",
    "unit.attached",
    "unit.fence.before",
    "unit.fence.after",
    "unit.write.between_frames",
    "unit.read.copied",
)
UNIT_POINTS_THAT_FAIL = (
    "unit.attach",
    "unit.attached",
    "unit.fence.before",
    "unit.write.between_frames",
    "unit.read.copied",
)
"""Where an exception is one request's, or one order's: it is told, and the unit goes on."""
UNIT_FIRST_POINTS = ("unit.reserved", "unit.before_grown")
"""Only the first runs of a storage unit reach these places. They are killed there when the storm begins."""
ELSEWHERE = {
    "move.before_switch": "tests/contract/test_drain.py",
    "move.mid_copy": "tests/contract/test_drain.py",
    "unit.start_over": "tests/faults/test_lost_state.py",
    "fetch.between_header_and_payload": "tests/workers/training/test_mixin.py",
}
"""Places that no process of a storm comes by, and the tests that do."""
UNITS = {"north": ("unit.read.copied",), "south": ("unit.write.between_frames",)}
LINKS = ("clients", "south-link", "north", "south")
NOT_RAISED = frozenset({"get.before_release", *BEGIN, *ATTACH, "session.found"})
"""An exception between a copy and the release of its pin leaves the pin to the end of the session, as it would in any
program; at the others it is no call that fails."""


@dataclass(frozen=True)
class Fault:
    """kind: "order" (to `who`, `order`), "kill" and "stop" (`who`), "network" (the link `who`: `how`), "service"."""

    kind: str
    who: str
    order: Order | None = None
    how: str = ""

    def __str__(self) -> str:
        if self.order is not None:
            return f"{self.who}: {self.order.how} at {self.order.at}"
        return f"{self.kind} {self.who} {self.how}".rstrip()


def known_points() -> set[str]:
    """All failpoints that a storm comes by, as `failpoints.NAMES` has them."""
    points = {*CONTROLLER_AT_START, *CONTROLLER_POINTS, *UNIT_AT_START, *UNIT_POINTS, *UNIT_FIRST_POINTS}
    points.update(at for points in CLIENT_POINTS.values() for at in points)
    return {failpoints.general(at) for at in points}


def every_fault() -> Iterable[Fault]:
    """Each once. Clients die where they come by, and one of them stops there."""
    stopped: set[str] = set()
    for who, points in CLIENT_POINTS.items():
        for at in points:
            if who != "roamer" or at not in TAKE:
                yield Fault("order", who, Order(at, "kill"))
            if at not in stopped and (who != "saver" or not at.startswith("call.")):
                stopped.add(at)
                yield Fault("order", who, Order(at, "stop"))
            if who == "roamer":
                yield Fault("order", who, Order(at, "cancel"))
            elif at not in NOT_RAISED:
                yield Fault("order", who, Order(at, "raise"))
    for how in ("kill", "stop"):
        for at in (*CONTROLLER_AT_START, *CONTROLLER_POINTS):
            yield Fault("order", "controller", Order(at, how))
        for number, at in enumerate((*UNIT_AT_START, *UNIT_POINTS)):
            unit = next((name for name, own in UNITS.items() if at in own), list(UNITS)[number % 2])
            yield Fault("order", unit, Order(at, how))
            if how == "kill" and at in UNIT_POINTS_THAT_FAIL:
                yield Fault("order", unit, Order(at, "raise"))
        for who in ("controller", *UNITS, *CLIENT_POINTS):
            yield Fault(how, who)
    for link in LINKS:
        for how in DISTURBANCES:
            yield Fault("network", link, how=how)
    yield Fault("service", "")
