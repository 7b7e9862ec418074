"""Bounds on what one client can make the ledger hold or do in one step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Every count is inclusive.

    in_flight: numbers a session may use above its watermark. parked: commands waiting, over all sessions.
    samples: samples or values in one command. columns: columns in one command, and fields or tags of a partition.
    id_bytes: UTF-8 bytes of a sample id, partition, task, field or tag name. tag_bytes: characters of one string tag.
    interests: (task, fields) combinations per partition whose ready samples are tracked; more are tracked in turns.
    """

    in_flight: int = 4096
    parked: int = 65536
    sessions: int = 65536
    partitions: int = 65536
    samples: int = 1 << 20
    columns: int = 4096
    id_bytes: int = 1024
    tag_bytes: int = 1 << 16
    interests: int = 64
