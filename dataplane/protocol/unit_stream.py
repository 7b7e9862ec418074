"""What travels on a storage unit's stream, both ways."""

from __future__ import annotations

from dataplane.errors import InvalidRequestError
from dataplane.ledger import commands as c
from dataplane.protocol import codec
from dataplane.protocol.pb import control_pb2 as pb

Report = (
    c.AddUnit | c.SessionAttached | c.SessionGone | c.SessionAlive | c.Grown | c.Shrunk | c.Compacted | c.RowsChecked
)

_REPORTS: dict[str, type[c.Input]] = {
    "add": c.AddUnit,
    "attached": c.SessionAttached,
    "gone": c.SessionGone,
    "alive": c.SessionAlive,
    "grown": c.Grown,
    "shrunk": c.Shrunk,
    "checked": c.RowsChecked,
    "compacted": c.Compacted,
}
_ORDERS: dict[str, type[c.Output]] = {
    "added": c.UnitAdded,
    "fence": c.FenceSession,
    "grow": c.GrowArena,
    "shrink": c.ShrinkArena,
    "check": c.CheckRows,
    "compact": c.CompactArena,
}
_REPORT_NAMES = {value: name for name, value in _REPORTS.items()}
_ORDER_NAMES = {value: name for name, value in _ORDERS.items()}


def report_to_pb(report: c.Input) -> pb.UnitReport:
    """`InvalidRequestError` for inputs that are no unit's to report."""
    name = _REPORT_NAMES.get(type(report))
    if name is None:
        raise InvalidRequestError(f"{type(report).__name__} is not a storage unit's to report")
    return pb.UnitReport(**{name: codec.to_pb(report)})  # type: ignore[arg-type]


def report_from_pb(wire: pb.UnitReport) -> Report:
    """`InvalidRequestError` for a report of a kind this version does not know."""
    name = wire.WhichOneof("report")
    if name is None:
        raise InvalidRequestError("a report without content; is the storage unit newer than the controller?")
    report: Report = codec.from_pb(_REPORTS[name], getattr(wire, name))
    return report


def order_to_pb(order: c.Output) -> pb.UnitOrder:
    """The message of `UnitAdded` or an order."""
    return pb.UnitOrder(**{_ORDER_NAMES[type(order)]: codec.to_pb(order)})  # type: ignore[arg-type]


def order_from_pb(wire: pb.UnitOrder) -> c.Output:
    """`InvalidRequestError` for an order of a kind this version does not know."""
    name = wire.WhichOneof("order")
    if name is None:
        raise InvalidRequestError("an order without content; is the controller newer than the storage unit?")
    order: c.Output = codec.from_pb(_ORDERS[name], getattr(wire, name))
    return order
