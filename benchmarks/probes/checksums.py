"""The cost of checksums of rows: the same batch with and without them, in turns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from statistics import median

from benchmarks.measure import alternating, ratios
from benchmarks.payload import Batch, build
from benchmarks.plan import TOKENS
from benchmarks.probes.base import PARTITION, Figure
from benchmarks.systems.service import Service
from dataplane import DataPlaneClient, connect

POLICIES = ("never", "across-hosts", "always")
CAPACITY_BYTES = 256 << 20
WARM_UP = 2


def cost(*, quick: bool) -> list[Figure]:
    """Return the times of a put and a read of 19 MB relative to those without checksums: over shared memory on one
    host, with the default policy (no checksums there) and with checksums of all rows; and over TCP, with the
    default policy, which makes checksums there."""
    taken: dict[tuple[str, str, str], list[float]] = {}
    batch = build(TOKENS)
    with contextlib.ExitStack() as stack:
        clients = {
            (policy, connection_kind): stack.enter_context(_client(policy, remote=connection_kind == "remote"))
            for policy in POLICIES
            for connection_kind in ("local", "remote")
        }
        for order in alternating(list(clients.items()), (7 if quick else 15) + WARM_UP):
            for (policy, connection_kind), client in order:
                _turn(client, batch)
                for op, seconds in _turn(client, batch).items():
                    taken.setdefault((policy, connection_kind, op), []).append(seconds)
    measured = {key: seconds[WARM_UP:] for key, seconds in taken.items()}
    return [
        Figure(
            name=f"{op} 19 MB, {connection_kind}, checksums {policy} : never",
            rounds=ratios(measured[policy, connection_kind, op], measured["never", connection_kind, op]),
            unit="x time",
            note=f"{1e3 * median(measured['never', connection_kind, op]):.2f} ms without",
        )
        for connection_kind, policy in (("local", "across-hosts"), ("local", "always"), ("remote", "across-hosts"))
        for op in ("put", "read")
    ]


@contextlib.contextmanager
def _client(policy: str, *, remote: bool) -> Iterator[DataPlaneClient]:
    service = Service({"capacity_bytes": CAPACITY_BYTES, "checksums": policy}, tcp_only=remote)
    try:
        with connect(service.address, force_remote=remote) as client:
            client.register_partition(PARTITION, [], None, ["task"])
            yield client
    finally:
        service.close()


def _turn(client: DataPlaneClient, batch: Batch) -> dict[str, float]:
    """Return the seconds of a put and of a read."""
    began = time.perf_counter()
    meta = client.put_samples(batch.ids, PARTITION, batch.columns)
    put = time.perf_counter()
    read = client.get_samples(meta, PARTITION, batch.names)
    done = time.perf_counter()
    del read
    client.clear_samples(meta, PARTITION)
    return {"put": put - began, "read": done - put}
