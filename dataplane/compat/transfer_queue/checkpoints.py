"""Checkpoints: a directory with `metadata.json`, which has what the caller adds, and `samples`, a checkpoint of this
project's."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataplane.compat.transfer_queue import fetching
from dataplane.compat.transfer_queue.client import TransferQueueClient
from dataplane.compat.transfer_queue.session import get_client
from dataplane.core.private_dir import MODE, private

log = logging.getLogger(__name__)

METADATA = "metadata.json"
SAMPLES = "samples"


def save_checkpoint(
    checkpoint_dir: str | Path, include_storage: bool = True, metadata: Mapping[str, Any] | None = None
) -> None:
    """Save all partitions as they are together at one instant: samples, tags, and what each task has claimed for good.

    checkpoint_dir: on a disk of this process, made for this user only; an older checkpoint there is replaced when this
    one is whole. include_storage: False is not looked at, samples are always saved. metadata: what JSON can hold.
    RuntimeError before `init()`, `CheckpointWriteError` (an OSError) where the disk fails.
    """
    client = get_client()
    if not include_storage:
        log.warning("include_storage=False is not looked at: without samples a checkpoint could not be loaded")
    save_from(client, checkpoint_dir, metadata)


def save_from(client: TransferQueueClient, directory: str | Path, metadata: Mapping[str, Any] | None) -> None:
    """What `save_checkpoint` does."""
    place = Path(directory).absolute()
    aside, old = _beside(place, "tmp"), _beside(place, "old")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(MODE, parents=True)
    try:
        names = client.get_partition_list()
        if names:
            client._performer.client.checkpoint(aside / SAMPLES, names)
        _write(aside / METADATA, {"storage_saved": True, "user_metadata": dict(metadata or {})})
        _sync(aside)
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
            place.rename(old)
        aside.rename(place)
        _sync(place.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        if old.exists() and not place.exists():
            old.rename(place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Bring back what was saved, in place of all partitions that are there. Samples get new global indexes: metas from
    before are refused; batches that ranks shared are drawn anew.

    Every checksum is verified first (`CheckpointError`, a ValueError, names the file that differs), and what was saved
    comes back all or none; then partitions that were not saved go. FileNotFoundError where there is no checkpoint,
    RuntimeError before `init()`.
    """
    load_into(get_client(), checkpoint_dir)


def load_into(client: TransferQueueClient, directory: str | Path) -> None:
    """What `load_checkpoint` does."""
    place = Path(directory).absolute()
    if not place.exists() and _beside(place, "old").exists():
        log.warning("a save to %s was interrupted: the checkpoint before it is taken", place)
        _beside(place, "old").rename(place)
    if not (place / METADATA).exists():
        raise FileNotFoundError(f"there is no checkpoint in {place}: it has no {METADATA}")
    saved: set[str] = set()
    if (place / SAMPLES).exists():
        saved = set(client._performer.client.restore(place / SAMPLES, replace=True).partitions)
    for name in client.get_partition_list():
        if name not in saved:
            client.clear_partition(name)
    for name in saved:
        client._performer.do(fetching.forget_draws, name)


def _beside(place: Path, suffix: str) -> Path:
    return place.with_name(f"{place.name}.{suffix}")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with open(path, "x", encoding="utf-8", opener=private) as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
