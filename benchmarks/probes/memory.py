"""What a put or a read takes of the client's memory while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.payload import BatchSpec, Shape, build
from benchmarks.probes.base import PARTITION, Figure, service

SAMPLE_S = 0.002


def peaks(*, quick: bool) -> list[Figure]:
    """Peak of resident memory beyond what there was before, as a share of the payload: of a put (whose payload the
    caller holds already) and of a read (whose result is the payload once)."""
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
    """Bytes of resident memory at the most while `call` ran, less those before."""
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
    """Resident memory of this process, the mappings of arenas left out."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            counted = "/tq-arena-" not in rest
        elif counted and first == "Rss:":
            total += int(rest.split()[0]) * 1024
    return total
