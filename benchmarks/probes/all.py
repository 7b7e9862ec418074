"""All probes, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.probes import (
    adapter,
    broadcast,
    calls,
    channels,
    checksums,
    claims,
    controller,
    crowd,
    live,
    memory,
    messages,
    native,
    packing,
    ranks,
    sessions,
    waiting,
)
from benchmarks.probes.base import Figure

PROBES: Mapping[str, Callable[..., list[Figure]]] = {
    "adapter beside TransferQueue": adapter.beside_the_original,
    "native beside TransferQueue": native.beside_the_original,
    "single-sample puts of many clients": crowd.small_puts,
    "crowd of sessions": sessions.crowd,
    "commands of many ranks": ranks.steps,
    "large batches of several clients": crowd.large_batches,
    "waking a claim": claims.wake,
    "growth with stored samples": live.growth,
    "puts beside calls that wait": waiting.beside,
    "processor time of the controller": controller.commands,
    "client memory": memory.peaks,
    "checksums of rows": checksums.cost,
    "leader broadcast": broadcast.leader_broadcast,
    "broadcast among workers": messages.broadcasts,
    "small messages among workers": messages.small_messages,
    "calls of worker groups": calls.round_trips,
    "channels": channels.channels_and_queues,
    "sharding over ranks": packing.sharding,
}
