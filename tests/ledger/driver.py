"""A ledger and its clients, for example tests: one call per line, answers checked to be one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from dataplane.core.types import PROTOCOL_VERSION, FieldKind, FieldSpec
from dataplane.errors import DataPlaneError
from dataplane.ledger import Ledger, Limits
from dataplane.ledger import commands as c
from tests.ledger.oracle import overlooked

R = TypeVar("R", bound=c.Result)
BYTES = FieldSpec(FieldKind.JAGGED, "uint8", ())
MIB = 1 << 20


def handles(meta: c.Committed | c.Claimed | c.Listed | c.Located) -> c.Samples:
    return c.Samples(rows=meta.rows, generations=meta.generations)


def by_ids(*ids: str) -> c.Samples:
    return c.Samples(ids=ids)


def part_of(got: c.Claimed, *ids: str) -> dict[str, Any]:
    """How a command about a claim names what that got: all of it, or these samples."""
    places = [got.ids.index(name) for name in ids] if ids else list(range(len(got.ids)))
    samples = c.Samples(rows=got.rows[places], generations=got.generations[places])
    return {"samples": samples, "claims": np.full(len(places), got.claim, np.int64)}


class Driver:
    """Applies inputs to a ledger, keeps the log and what came out that nobody has looked at."""

    judged = 60
    """After so many inputs, from the first on, those who wait (if they are not too many) are all judged again."""

    def __init__(self, *, capacity: int = MIB, units: int = 1, limits: Limits | None = None, **settings: Any) -> None:
        self.settings = {"limits": limits or Limits(), **settings}
        self.ledger = Ledger(7, **self.settings)
        self.log: list[c.Input] = []
        self.orders: list[c.Output] = []
        self.answers: dict[tuple[int, int], list[c.Result | DataPlaneError]] = {}
        self.now = 0.0
        for i in range(units):
            self.add_unit(name=f"unit{i}", capacity=capacity)

    def apply(self, item: c.Input) -> list[c.Output]:
        self.log.append(item)
        out = self.ledger.apply(item)
        if len(self.log) <= self.judged and self.ledger._state.parked <= 64:
            assert not overlooked(self.ledger), f"{item} should have ended calls that wait"
        for output in out:
            if isinstance(output, c.Answer):
                self.answers.setdefault((output.session, output.call_id), []).append(output.result)
            else:
                self.orders.append(output)
        return out

    def add_unit(
        self,
        *,
        name: str = "u",
        host: str = "here",
        capacity: int = MIB,
        backed: int | None = None,
        epoch: int = 1,
        **more: Any,
    ) -> c.UnitAdded:
        return self.offer(
            name,
            host=host,
            epoch=epoch,
            cookie=f"cookie-{name}",
            capacity_bytes=capacity,
            backed_bytes=capacity if backed is None else backed,
            **more,
        )

    def offer(self, name: str, **more: Any) -> c.UnitAdded:
        """What the service says to a unit that offers itself so."""
        offer = {
            "host": "here",
            "epoch": 1,
            "capacity_bytes": MIB,
            "backed_bytes": MIB,
            "endpoints": ("tcp://127.0.0.1:1",),
            "arena_path": f"/arena/{name}",
        }
        out = self.apply(c.AddUnit(name=name, **{**offer, **more}))
        assert isinstance(out[0], c.UnitAdded)
        return out[0]

    def tick(self, to: float) -> list[c.Output]:
        self.now = to
        return self.apply(c.Tick(now=to))

    def client(self, name: str = "client", *, host: str = "here", attach: Sequence[int] = ()) -> Client:
        nonce = f"{name}-{len(self.log)}"
        out = self.apply(c.OpenSession(nonce=nonce, host=host, name=name, protocol_version=PROTOCOL_VERSION))
        opened = out[0]
        assert isinstance(opened, c.Opened)
        assert opened.error is None
        for unit in attach:
            self.apply(c.SessionAttached(unit=unit, session=opened.session))
        return Client(self, opened.session)

    def take_orders(self) -> list[c.Output]:
        orders, self.orders = self.orders, []
        return orders

    def fences(self) -> list[tuple[int, int]]:
        """(unit, session) of the fence orders since the last look."""
        return [(o.unit, o.session) for o in self.take_orders() if isinstance(o, c.FenceSession)]

    def replay(self) -> Ledger:
        """A fresh ledger fed with the log."""
        ledger = Ledger(7, **self.settings)
        for item in self.log:
            ledger.apply(item)
        return ledger


class Client:
    """A client that answers nothing late: its watermark is its lowest unanswered call id."""

    def __init__(self, driver: Driver, session: int) -> None:
        self.driver = driver
        self.session = session
        self.last_call_id = 0
        self.open: list[int] = []
        self.watermark: int | None = None

    def post(self, command: c.Command, *, call_id: int | None = None) -> int:
        """Send without looking at the answer."""
        if call_id is None:
            self.last_call_id += 1
            call_id = self.last_call_id
            self.open.append(call_id)
        self._settle()
        watermark = self.watermark or min(self.open, default=call_id)
        self.driver.apply(
            c.Call(session=self.session, call_id=call_id, watermark=min(watermark, call_id), command=command)
        )
        return call_id

    def _settle(self) -> None:
        self.open = [n for n in self.open if (self.session, n) not in self.driver.answers]

    def result(self, call_id: int) -> c.Result | DataPlaneError | None:
        """The one answer so far, or None while there is none."""
        got = self.driver.answers.get((self.session, call_id), [])
        assert len(got) <= 1, got
        return got[0] if got else None

    def raw(self, command: c.Command) -> c.Result | DataPlaneError:
        got = self.result(self.post(command))
        assert got is not None, f"{type(command).__name__} was parked"
        return got

    def call(self, kind: type[R], command: c.Command) -> R:
        got = self.raw(command)
        if isinstance(got, DataPlaneError):
            raise got
        assert isinstance(got, kind)
        return got

    def do(self, command: c.Command) -> None:
        got = self.raw(command)
        if isinstance(got, DataPlaneError):
            raise got
        assert isinstance(got, c.Done | c.ClaimsSettled), got

    def raise_(self, command: c.Command) -> None:
        """A call that must fail: raises its error."""
        got = self.raw(command)
        assert isinstance(got, DataPlaneError), got
        raise got

    def waits(self, command: c.Command) -> int:
        """Post a call that parks."""
        call_id = self.post(command)
        assert self.result(call_id) is None
        return call_id

    # --- common calls

    def register(self, partition: str = "p", fields: Sequence[str] = (), **more: Any) -> None:
        settings = {"num_samples": None, "tasks": ("train",), **more}
        specs = more.pop("specs", {name: FieldSpec() for name in fields})
        settings.pop("specs", None)
        self.do(c.Register(partition=partition, fields=specs, **settings))

    def allocate(self, sizes: Mapping[str, Sequence[int]], partition: str = "p", **more: Any) -> c.Allocate:
        columns = tuple(c.ColumnSizes(name=name, sizes=np.array(s, np.int64)) for name, s in sizes.items())
        return c.Allocate(partition=partition, columns=columns, **more)

    def put(
        self,
        samples: c.Samples | Sequence[str],
        lengths: Mapping[str, Sequence[int]] | None = None,
        *,
        partition: str = "p",
        mode: c.Mode = c.Mode.UPSERT,
        tags: Mapping[str, Sequence[Any]] | None = None,
        index: Sequence[int] | None = None,
        spec: FieldSpec = BYTES,
        update: bool = False,
        unit_wish: int | None = None,
    ) -> c.Committed:
        """Allocate and commit bytes (`lengths` by column)."""
        samples = samples if isinstance(samples, c.Samples) else c.Samples(ids=tuple(samples))
        reservation = None
        if lengths:
            scale = spec.unit_bytes
            sizes = {name: [n * scale for n in column] for name, column in lengths.items()}
            wish = {"update": update, "unit_wish": unit_wish, "samples": samples}
            call_id = self.post(self.allocate(sizes, partition, **wish))
            got = self.result(call_id)
            if isinstance(got, DataPlaneError):
                raise got
            assert isinstance(got, c.Allocated)
            reservation = call_id
        return self.call(
            c.Committed,
            c.Commit(
                partition=partition,
                samples=samples,
                mode=mode,
                reservation=reservation,
                columns=commit_columns(lengths or {}, spec=spec, index=index),
                tags=tuple(c.TagColumn(name=name, values=tuple(v)) for name, v in (tags or {}).items()),
            ),
        )

    def claim(self, batch_size: int, fields: Sequence[str] = (), **more: Any) -> c.Claim:
        settings = {"partition": "p", "task": "train", **more}
        return c.Claim(fields=tuple(fields), batch_size=batch_size, **settings)

    def claimed(self, batch_size: int, fields: Sequence[str] = (), **more: Any) -> tuple[str, ...]:
        return self.call(c.Claimed, self.claim(batch_size, fields, **more)).ids

    def claimed_by(self, call_id: int) -> tuple[str, ...]:
        """Ids of a parked claim that was answered since."""
        got = self.result(call_id)
        assert isinstance(got, c.Claimed), got
        return got.ids

    def ack(self, got: c.Claimed, *ids: str, task: str = "train") -> tuple[int, ...]:
        """Acknowledge all that a claim got, or these samples of it; the places of those that were cleared."""
        return self._settle_claim(c.Ack(partition="p", task=task, **part_of(got, *ids)))

    def nack(self, got: c.Claimed, *ids: str, task: str = "train") -> tuple[int, ...]:
        """Give them back."""
        return self._settle_claim(c.Nack(partition="p", task=task, **part_of(got, *ids)))

    def extend(self, got: c.Claimed, *ids: str, lease_s: float, task: str = "train") -> tuple[int, ...]:
        """Let their leases end `lease_s` from now."""
        return self._settle_claim(c.Extend(partition="p", task=task, lease_s=lease_s, **part_of(got, *ids)))

    def _settle_claim(self, command: c.Ack | c.Nack | c.Extend) -> tuple[int, ...]:
        return tuple(self.call(c.ClaimsSettled, command).cleared.tolist())

    def locate(self, samples: c.Samples, fields: Sequence[str] = ("x",), partition: str = "p") -> c.Located:
        return self.call(c.Located, c.Locate(partition=partition, samples=samples, fields=tuple(fields)))

    def clear(self, *ids: str, partition: str = "p") -> int:
        return self.call(c.Cleared, c.Clear(partition=partition, samples=c.Samples(ids=ids))).count

    def stats(self) -> c.StatsReport:
        return self.call(c.StatsReport, c.Stats())

    def unit(self, unit_id: int = 1) -> c.UnitStats:
        return next(unit for unit in self.stats().units if unit.unit == unit_id)

    def used(self, unit: int = 1) -> int:
        """Bytes in use of a unit; checks that its sums agree."""
        stats = self.unit(unit)
        used = stats.reserved_bytes + stats.live_bytes + stats.retired_bytes
        assert used + stats.free_bytes + stats.unbacked_bytes == stats.capacity_bytes
        return used


def commit_columns(
    lengths: Mapping[str, Sequence[int]], *, spec: FieldSpec = BYTES, index: Sequence[int] | None = None
) -> tuple[c.CommitColumn, ...]:
    where = None if index is None else np.array(index, np.int64)
    return tuple(
        c.CommitColumn(name=name, spec=spec, lengths=np.array(column, np.int64), index=where)
        for name, column in lengths.items()
    )
