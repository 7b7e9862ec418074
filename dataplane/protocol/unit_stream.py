"""Conversion of a storage unit's reports and the controller's orders, which share one stream."""

from __future__ import annotations

from dataplane.errors import InvalidRequestError
from dataplane.ledger import commands as c
from dataplane.protocol import codec
from dataplane.protocol.pb import control_pb2 as pb

Report = c.AddUnit | c.SessionAttached | c.SessionGone | c.SessionAlive | c.Grown

_REPORTS: dict[str, type[c.Input]] = {
    "add": c.AddUnit,
    "attached": c.SessionAttached,
    "gone": c.SessionGone,
    "alive": c.SessionAlive,
    "grown": c.Grown,
}
_ORDERS: dict[str, type[c.Output]] = {
    "added": c.UnitAdded,
    "fence": c.FenceSession,
    "grow": c.GrowArena,
}
_REPORT_NAMES = {value: name for name, value in _REPORTS.items()}
_ORDER_NAMES = {value: name for name, value in _ORDERS.items()}


def report_to_pb(report: c.Input) -> pb.UnitReport:
    """Return the message of a report. Raises `InvalidRequestError` for an input that a unit cannot report."""
    name = _REPORT_NAMES.get(type(report))
    if name is None:
        raise InvalidRequestError(f"a storage unit cannot report {type(report).__name__}")
    return pb.UnitReport(**{name: codec.to_pb(report)})  # type: ignore[arg-type]


def report_from_pb(wire: pb.UnitReport) -> Report:
    """Return the report of a message. Raises `InvalidRequestError` for a malformed message or a kind of report that
    this version does not support."""
    name = wire.WhichOneof("report")
    if name is None:
        raise InvalidRequestError(
            "empty or unsupported report; the storage unit may be newer than the controller: install the same "
            "release on both"
        )
    report: Report = codec.from_pb(_REPORTS[name], getattr(wire, name))
    return report


def order_to_pb(order: c.Output) -> pb.UnitOrder:
    """Return the message of `UnitAdded` or an order."""
    return pb.UnitOrder(**{_ORDER_NAMES[type(order)]: codec.to_pb(order)})  # type: ignore[arg-type]


def order_from_pb(wire: pb.UnitOrder) -> c.Output:
    """Return the order of a message. Raises `InvalidRequestError` for a malformed message or a kind of order that this
    version does not support."""
    name = wire.WhichOneof("order")
    if name is None:
        raise InvalidRequestError(
            "empty or unsupported order; the controller may be newer than the storage unit: install the same release "
            "on both"
        )
    order: c.Output = codec.from_pb(_ORDERS[name], getattr(wire, name))
    return order
