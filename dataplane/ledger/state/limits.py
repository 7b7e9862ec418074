"""Bounds on what one client can make the ledger hold or do in one step."""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.errors import LimitError

SPLIT = "Send several smaller ones."


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Every count is inclusive. What is beyond one is refused with a `LimitError`.

    in_flight: calls of a session without an answer that it has confirmed; those that undo one are never refused.
    answer_bytes: about how much of large answers a session's calls keep until they are confirmed, and at least one.
    parked: commands waiting, over all sessions.
    samples: samples or values in one command, and of one claim. columns: columns, fields or conditions in one command,
    and fields, tasks, tags or enumerations of a partition.
    id_bytes: UTF-8 bytes of a sample id or the name of a partition, task, field, tag, client or unit. tag_bytes:
    characters of one string tag. path_bytes: characters of a path or endpoint that a client or unit tells.
    preallocated_part: one request of a session for preallocated space is for at most this part (1/preallocated_part) of
    what new rows may take in a unit. steps: steps of a task whose shares are remembered. saves: what one session has
    taken with `Save` and not released, at once; each holds 20 bytes a cell. interests: (task, fields) combinations per
    partition whose ready samples are tracked; more are tracked in turns.
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
    """`LimitError` if there is more than `limit`."""
    if got > limit:
        raise LimitError(what=what, got=got, limit=limit, hint=hint)
