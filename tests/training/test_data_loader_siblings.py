# ruff: noqa: F401, F811
"""Ranks of one replica stream the same micro-batches."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import dataplane
from dataplane import DataPlaneClient, Server
from tests.gloo import Ranks
from tests.service import client, server
from tests.streams import partition, prefetches, put
from tests.workers.training.mixin_worker import worker_on

pytestmark = pytest.mark.integration


def stream_in_step(
    rank: int,
    address: str,
    partition: str,
    prefetch: int,
    timeout_s: float | None,
) -> Any:
    worker = worker_on(rank, "tp2", address)
    worker.fetch_timeout_s = timeout_s
    fields = ["input_ids", "reward"]
    got: list[Any] = []
    options = {"prefetch": prefetch, "pad_to_multiple": 4, "timeout_s": timeout_s}
    with worker.stream(partition, "train", fields, batch_size=2, **options) as stream:
        for data, meta in stream:
            got.append((data["input_ids"].tolist(), meta))
            if len(got) == 1 and rank == 0:
                with dataplane.connect(address) as client:
                    client.seal(partition)
    threads = [thread.name for thread in threading.enumerate() if partition in thread.name]
    try:
        worker.stream("nowhere", "train", fields, batch_size=2).__iter__().__next__()
    except KeyError as error:
        got.append(type(error).__name__)
    worker.close_data_plane()
    return got, threads


@prefetches
@pytest.mark.parametrize("timeout_s", [60.0, None])
def test_siblings_get_the_same(
    pair: Ranks,
    server: Server,
    client: DataPlaneClient,
    partition: str,
    prefetch: int,
    timeout_s: float | None,
) -> None:
    meta = put(client, partition, range(3))
    leader, sibling = pair.run(stream_in_step, server.address, partition, prefetch, timeout_s)
    if isinstance(leader, Exception):
        raise leader
    assert leader == sibling
    (first, second, error), threads = leader
    assert first[0] == [[0, 99, 99, 99], [1, 1, 99, 99]]
    assert second[0] == [[2, 2, 2, 99]]
    assert (error, threads) == ("PartitionNotFoundError", [])
    assert first[1].sample_ids == ["s0", "s1"]
    assert first[1].handles[1].tolist() == meta.handles[1].tolist()[:2], "it can be written back to"  # type: ignore[index]
    assert first[1].tags == [{"input_lengths": 1}, {"input_lengths": 2}]


def disagree(rank: int, address: str, partition: str) -> str:
    worker = worker_on(rank, "tp2", address)
    with worker.stream(partition, "train", ["reward"], batch_size=2 + rank, prefetch=0) as stream:
        try:
            next(iter(stream))
        except RuntimeError as error:
            return str(error)
        finally:
            worker.close_data_plane()
    raise AssertionError("nobody raised")


def test_siblings_stream_the_same_way(pair: Ranks, server: Server, client: DataPlaneClient, partition: str) -> None:
    put(client, partition, range(3))
    for message in pair.run(disagree, server.address, partition):
        assert "that differs from the meta of the leader" in str(message)
