"""What a put or a read takes of the client's private memory while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.payload import BatchSpec, Shape, build
from benchmarks.probes.base import PARTITION, Figure, service

SAMPLE_S = 0.001


def peaks(*, quick: bool) -> list[Figure]:
    """Peak of private memory beyond what there was before, as a share of the payload: of a put (whose payload the
    caller holds already) and of a read (whose result is the payload once)."""
    batch = build(BatchSpec(shape=Shape.DENSE, rows=1024, length=8192, fields=9))
    with service(capacity_bytes=2 << 30) as (_, client):
        meta = client.put_samples(batch.ids, PARTITION, batch.columns)
        client.clear_samples(meta, PARTITION)
        put = _peak(lambda: client.put_samples(batch.ids, PARTITION, batch.columns))
        meta = client.list_samples(PARTITION)
        read = _peak(lambda: client.get_samples(meta, PARTITION, batch.names))
    note = "302 MB dense; sampled every millisecond"
    return [
        Figure(name="peak of a put beyond the caller's payload", value=put / batch.nbytes, unit="x payload", note=note),
        Figure(name="peak of a read", value=read / batch.nbytes, unit="x payload", note=note),
    ]


def _peak(call: Callable[[], Any]) -> int:
    """Bytes of private memory at the most while `call` ran, less those before."""
    before = _private_bytes()
    highest = [before]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(SAMPLE_S):
            highest.append(_private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = call()
    highest.append(_private_bytes())
    stop.set()
    watcher.join()
    del result
    return max(highest) - before


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no line 'RssAnon:'")
