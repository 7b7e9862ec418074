"""A process with many sessions, for `test_crowd`: its side of the conversation."""

from __future__ import annotations

import asyncio
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from dataplane import AsyncDataPlaneClient, connect_async
from dataplane.protocol.fd_limits import allow_more

LIMIT_S = 400.0
LONG_TIMEOUTS: dict[str, Any] = {"connect_timeout_s": LIMIT_S, "call_timeout_s": LIMIT_S}
"""Settings of a client, for a service that has a thousand sessions on a machine with few cores."""
AT_ONCE = 4
"""So many sessions of a process are opened, or closed, at once."""


class Failure(str):
    """The traceback of what a process failed with."""


def content(sample_id: str) -> list[int]:
    """What a sample holds follows from its id."""
    group, number = map(int, sample_id.split("-"))
    return [group, *range(number % 7), number]


async def one_turn(client: AsyncDataPlaneClient, sample_id: str) -> None:
    """Open the session, put a sample, claim one, read it: it is what its id says."""
    await client.put_samples([sample_id], "turns", {"x": [torch.tensor(content(sample_id))]})
    await claim_and_read(client, "turns")


async def claim_and_read(client: AsyncDataPlaneClient, partition: str) -> str:
    meta = await client.claim_meta(partition, "train", ["x"], 1, timeout_s=LIMIT_S)
    found = await client.get_data(meta)
    (sample_id,) = meta.sample_ids
    assert found["x"].unbind()[0].tolist() == content(sample_id), sample_id
    return sample_id


async def member(address: str, group: int, count: int, say: Connection) -> None:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, say.recv)
    clients = [connect_async(address, **LONG_TIMEOUTS) for _ in range(count)]
    for first in range(0, count, AT_ONCE):
        some = enumerate(clients[first : first + AT_ONCE], first)
        await asyncio.gather(*(one_turn(client, f"{group}-{number}") for number, client in some))
    say.send("turns done")
    claims = [asyncio.ensure_future(claim_and_read(client, "parked")) for client in clients]
    say.send(await asyncio.gather(*claims))
    await loop.run_in_executor(None, say.recv)
    for first in range(0, count, AT_ONCE):
        await asyncio.gather(*(client.close() for client in clients[first : first + AT_ONCE]))
    say.send("closed")


def run(address: str, group: int, count: int, say: Connection) -> None:
    """In a process of its own. When it is told something it begins, and says "turns done", then the samples that its
    parked claims got; when it is told something again it closes its sessions and says so. What fails it
    is said instead."""
    allow_more()
    try:
        asyncio.run(member(address, group, count, say))
    except Exception:
        say.send(Failure(traceback.format_exc()))
