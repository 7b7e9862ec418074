"""The clients of a storm: they put, claim, read, acknowledge, stream and save for ever, whatever happens to them.

Every row's content follows from its id, so that any reader can tell whether it is right. A client writes down what it
is about to do, and what it has done, before it goes on; so the rest can be reckoned up whenever it died.
"""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dataplane import (
    AsyncDataPlaneClient,
    DataPlaneClient,
    DataPlaneError,
    KVBatchMeta,
    ServiceUnavailableError,
    SessionExpiredError,
    StreamingDataLoader,
    connect,
    connect_async,
)
from tests.faults.acting import Actor, Disturbed, failed

PARTITION, TASK = "storm", "train"
ALBUM = "album"
FIELDS = ("tokens", "number", "text")
GROUP = 4
MOST_TOKENS = 3000
LONG_TIMEOUTS = {"heartbeat_s": 0.2, "reconnect_s": 120.0, "put_timeout_s": 120.0, "call_timeout_s": 120.0}
HURRIED = {"heartbeat_s": 0.2, "reconnect_s": 1.5, "put_timeout_s": 1.5, "call_timeout_s": 1.5}
LEASE_S = 2.0
CLAIM_S = 1.0
ENDINGS = (SessionExpiredError, ServiceUnavailableError)
"""After these a player begins anew, with another client."""


def content(name: str) -> dict[str, Any]:
    """The fields of sample `name`: tokens of a length of its own, a number, and a text."""
    seed = zlib.crc32(name.encode())
    tokens = np.random.default_rng(seed).integers(0, 1 << 40, 1 + seed % MOST_TOKENS)
    return {"tokens": torch.from_numpy(tokens), "number": float(seed % 1000), "text": f"{name}/{seed}"}


def columns(names: list[str]) -> dict[str, Any]:
    rows = [content(name) for name in names]
    return {
        "tokens": [row["tokens"] for row in rows],
        "number": torch.tensor([row["number"] for row in rows]),
        "text": [row["text"] for row in rows],
    }


def check(batch: Any, names: list[str]) -> None:
    """Compare each row with what its id says. AssertionError naming the sample."""
    rows = batch["tokens"].unbind()
    for place, name in enumerate(names):
        expected = content(name)
        assert torch.equal(rows[place], expected["tokens"]), f"torn or stale: tokens of {name}"
        assert batch["number"][place].item() == expected["number"], f"torn or stale: number of {name}"
        assert batch["text"][place] == expected["text"], f"torn or stale: text of {name}"


def verify(client: DataPlaneClient, meta: KVBatchMeta) -> None:
    """Read all fields of `meta` and compare."""
    check(client.get_batch(meta, FIELDS, layout="jagged"), meta.sample_ids)


@dataclass(frozen=True)
class Role:
    """How a player plays. settings: of its client. host: where it takes itself to be; "": where it is."""

    name: str
    settings: dict[str, Any]
    host: str = ""


def go_on(actor: Actor, error: Exception) -> None:
    """An operation failed with a named error, as it may; raises what ends a session."""
    if isinstance(error, ENDINGS) or (isinstance(error, DataPlaneError) and error.facts.get("lost")):
        raise error
    failed(actor, error)


def new_names(who: str) -> list[str]:
    """The samples of a group. Ids are never used twice, whatever became of a put."""
    number = time.time_ns()
    return [f"{who}-{number}-{member}" for member in range(GROUP)]


def produce(actor: Actor, address: str, role: Role) -> None:
    """Put groups one after another."""
    with connect(address, client_name=role.name, **role.settings) as client:
        while True:
            names = new_names(role.name)
            actor.note("putting", *names)
            try:
                client.put_samples(names, PARTITION, columns(names), mode="create")
            except (DataPlaneError, Disturbed) as error:
                go_on(actor, error)
            else:
                actor.note("put", *names)
            actor.has_done_something()


def consume(actor: Actor, address: str, role: Role) -> None:
    """Claim on lease, read and verify, acknowledge, clear."""
    with connect(address, client_name=role.name, **role.settings) as client:
        while True:
            try:
                meta = client.claim_meta(PARTITION, TASK, ["tokens"], GROUP, timeout_s=CLAIM_S, lease_s=LEASE_S)
                verify(client, meta)
                actor.note("acking", *meta.sample_ids)
                cleared = client.ack(meta)
                actor.note("acked", *(name for name in meta.sample_ids if name not in cleared))
                client.clear_samples(meta, PARTITION)
            except (DataPlaneError, Disturbed) as error:
                go_on(actor, error)
            actor.has_done_something()


def stream(actor: Actor, address: str, role: Role) -> None:
    """The same through a loader, which acknowledges a micro-batch when the next is asked for."""
    with (
        connect(address, client_name=role.name, **role.settings) as client,
        StreamingDataLoader(
            client,
            PARTITION,
            TASK,
            FIELDS,
            batch_size=GROUP,
            required_fields=["tokens"],
            layout="jagged",
            lease_s=LEASE_S,
            timeout_s=30.0,
        ) as loader,
    ):
        before: KVBatchMeta | None = None
        for batch, meta in loader:
            check(batch, meta.sample_ids)
            if before is not None:
                actor.note("acked", *before.sample_ids)
                client.clear_samples(before, PARTITION)
            actor.has_done_something()
            actor.note("acking", *meta.sample_ids)
            before = meta


def save(actor: Actor, address: str, role: Role) -> None:
    """Save a partition and restore it over itself: what is at the path is always a whole checkpoint."""
    path = actor.folder / f"{role.name}.checkpoint"
    with connect(address, client_name=role.name, **role.settings) as client:
        while True:
            try:
                if path.exists():
                    client.restore(path, replace=True)
                    verify(client, client.list_samples(ALBUM))
                client.clear_samples(None, ALBUM)
                client.register_partition(ALBUM, dict.fromkeys(FIELDS), None, [])
                names = new_names(role.name)
                client.put_samples(names, ALBUM, columns(names), mode="create")
                client.checkpoint(path, [ALBUM])
                client.clear_samples(None, ALBUM)
                client.restore(path)
                meta = client.list_samples(ALBUM)
                assert meta.sample_ids == names, f"saved {names}, restored {meta.sample_ids}"
                verify(client, meta)
            except (DataPlaneError, Disturbed) as error:
                go_on(actor, error)
            actor.has_done_something()


def roam(actor: Actor, address: str, role: Role) -> None:
    """Put and consume from asyncio, giving up one call in three after a moment."""
    asyncio.run(_roam(actor, address, role))


async def _roam(actor: Actor, address: str, role: Role) -> None:
    chance, loop = random.Random(role.name), asyncio.get_running_loop()
    async with connect_async(address, client_name=role.name, **role.settings) as client:
        while True:
            for step in (_put, _take):
                task = asyncio.ensure_future(step(actor, client, role.name))
                actor.cancel = lambda task=task: loop.call_soon_threadsafe(task.cancel)  # type: ignore[misc]
                await asyncio.wait([task], timeout=chance.random() * 0.02 if chance.random() < 0.3 else None)
                task.cancel()
                try:
                    await task
                except asyncio.CancelledError:
                    actor.note("error", "CancelledError")
                except (DataPlaneError, Disturbed) as error:
                    go_on(actor, error)
                await actor.has_done_something_async()


async def _put(actor: Actor, client: AsyncDataPlaneClient, who: str) -> None:
    names = new_names(who)
    actor.note("putting", *names)
    await client.put_samples(names, PARTITION, columns(names), mode="create")
    actor.note("put", *names)


async def _take(actor: Actor, client: AsyncDataPlaneClient, who: str) -> None:
    meta = await client.claim_meta(PARTITION, TASK, ["tokens"], GROUP, timeout_s=CLAIM_S, lease_s=LEASE_S)
    check(await client.get_batch(meta, FIELDS, layout="jagged"), meta.sample_ids)
    actor.note("acking", *meta.sample_ids)
    cleared = await client.ack(meta)
    actor.note("acked", *(name for name in meta.sample_ids if name not in cleared))
    await client.clear_samples(meta, PARTITION)
