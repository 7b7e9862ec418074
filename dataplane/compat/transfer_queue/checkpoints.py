"""Checkpoints: a directory with `metadata.json`, which has the caller's metadata, and `samples`, a native checkpoint of
this project."""

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
    """Save a consistent snapshot of all partitions: samples, tags, and the samples that each task has consumed.

    checkpoint_dir: a path on this machine, created with permissions for this user only. An older checkpoint there is
    replaced when this one is complete. include_storage: False is ignored, samples are always saved. metadata: values
    that JSON can represent. RuntimeError before `init()`, `CheckpointWriteError` (an OSError) if the disk fails.
    """
    client = get_client()
    if not include_storage:
        log.warning("include_storage=False is ignored: a checkpoint without samples could not be loaded")
    save_from(client, checkpoint_dir, metadata)


def save_from(client: TransferQueueClient, directory: str | Path, metadata: Mapping[str, Any] | None) -> None:
    """Implement `save_checkpoint` for this client."""
    target = Path(directory).absolute()
    new, old = _sibling(target, "tmp"), _sibling(target, "old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(MODE, parents=True)
    try:
        names = client.get_partition_list()
        if names:  # a checkpoint of no partitions has only the metadata
            client._performer.client.checkpoint(new / SAMPLES, names)
        _write_json(new / METADATA, {"storage_saved": True, "user_metadata": dict(metadata or {})})
        _fsync_directory(new)
        # Write beside the target, then rename: at any instant a complete checkpoint is at `target` or at `old`.
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)  # left by an interrupted save
            target.rename(old)
        new.rename(target)
        _fsync_directory(target.parent)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not target.exists():  # between the two renames: put the older checkpoint back
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Replace all partitions by the saved ones. Samples get new global indexes: older metas are rejected, and batches
    that ranks share are drawn again.

    All checksums are verified first (`CheckpointError`, a ValueError, names the damaged file). The saved partitions are
    restored atomically; then all other partitions are dropped. FileNotFoundError without a checkpoint, RuntimeError
    before `init()`.
    """
    load_into(get_client(), checkpoint_dir)


def load_into(client: TransferQueueClient, directory: str | Path) -> None:
    """Implement `load_checkpoint` for this client."""
    source = Path(directory).absolute()
    old = _sibling(source, "old")
    if not source.exists() and old.exists():  # a save ended between its two renames; see `save_from`
        log.warning("a save to %s was interrupted: the previous checkpoint is loaded", source)
        old.rename(source)
    if not (source / METADATA).exists():
        raise FileNotFoundError(f"no checkpoint was found in {source}: {METADATA} is missing")
    restored: set[str] = set()
    if (source / SAMPLES).exists():
        restored = set(client._performer.client.restore(source / SAMPLES, replace=True).partitions)
    for name in client.get_partition_list():
        if name not in restored:
            client.clear_partition(name)
    for name in restored:  # `clear_partition` has deleted the draws of the others
        client._performer.do(fetching.forget_draws, name)


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a new file with permissions for this user only, and flush it to disk."""
    with open(path, "x", encoding="utf-8", opener=private) as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _fsync_directory(directory: Path) -> None:
    """Flush the directory's entries to disk, so that new and renamed files are still there after a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
