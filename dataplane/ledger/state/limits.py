"""Limits on the memory and work that one client can cause in the ledger."""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.errors import LimitError

SPLIT = "Split it into several smaller ones."


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the ledger. Every limit is inclusive. A request beyond a limit fails with a `LimitError`.

    in_flight: calls of a session whose answers are not confirmed; calls that undo another call are always accepted.
    answer_bytes: approximate size of large answers kept per session until confirmed; one answer is always kept.
    parked: waiting commands of all sessions.
    samples: samples or values in one command, and samples of one claim. columns: columns, fields or conditions in one
    command, and fields, tasks, tags or enumerations of a partition.
    id_bytes: UTF-8 bytes of a sample id or the name of a partition, task, field, tag, client or unit. tag_bytes:
    characters of one string tag. path_bytes: characters of a path or endpoint sent by a client or unit.
    preallocated_part: one request for preallocated space may take at most 1/preallocated_part of the space for new rows
    in a unit. steps: steps of a task whose shares are remembered. saves: `Save` calls of one session that are not
    released; each holds 20 bytes per cell. interests: (task, fields) combinations per partition whose ready samples are
    tracked; beyond the limit, the least recently used one without waiting claims is replaced.
    """

    in_flight: int = 4096
    answer_bytes: int = 64 << 20
    parked: int = 65536
    sessions: int = 65536
    partitions: int = 65536
    units: int = 4096
    samples: int = 1 << 20
    columns: int = 4096
    id_bytes: int = 1024
    tag_bytes: int = 1 << 16
    path_bytes: int = 4096
    preallocated_part: int = 64
    steps: int = 256
    saves: int = 4
    interests: int = 64


def check_limit(what: str, got: int, limit: int, hint: str) -> None:
    """Raise `LimitError` if `got` exceeds `limit`."""
    if got > limit:
        raise LimitError(what=what, got=got, limit=limit, hint=hint)
