"""The client memory that a put or a read uses while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.payload import BatchSpec, Shape, build
from benchmarks.probes.base import PARTITION, Figure, service

SAMPLE_S = 0.002


def peaks(*, quick: bool) -> list[Figure]:
    """Measure the peak growth of resident memory as a share of the payload: for a put (whose payload the caller
    already holds) and for a read (whose result is one copy of the payload)."""
    batch = build(BatchSpec(shape=Shape.DENSE, rows=1024, length=8192, fields=9))
    with service(capacity_bytes=2 << 30) as (_, client):
        meta = client.put_samples(batch.ids, PARTITION, batch.columns)
        client.clear_samples(meta, PARTITION)
        put = _peak(lambda: client.put_samples(batch.ids, PARTITION, batch.columns))
        meta = client.list_samples(PARTITION)
        read = _peak(lambda: client.get_samples(meta, PARTITION, batch.names))
    note = "302 MB dense; without the arena's own pages"
    return [
        Figure(
            name="peak of a put beyond the caller's payload", rounds=[put / batch.nbytes], unit="x payload", note=note
        ),
        Figure(name="peak of a read", rounds=[read / batch.nbytes], unit="x payload", note=note),
    ]


def _peak(call: Callable[[], Any]) -> int:
    """Return the peak of resident memory while `call` ran, minus that before, in bytes."""
    before = _resident_bytes()
    highest = [before]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(SAMPLE_S):
            highest.append(_resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = call()
    highest.append(_resident_bytes())
    stop.set()
    watcher.join()
    del result
    return max(highest) - before


def _resident_bytes() -> int:
    """Return the resident memory of this process, without the mappings of arenas."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            counted = "/tq-arena-" not in rest
        elif counted and first == "Rss:":
            total += int(rest.split()[0]) * 1024
    return total
