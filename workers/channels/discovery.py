"""Lookup of brokers in the job's directory."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from workers.channels.jobs import job_directory
from workers.channels.settings import BROKER_NAME, broker_name
from workers.directory import DIRECTORY_VARIABLE, DirectoryClient, DirectoryEntry, Kind
from workers.errors import NameNotFoundError, WorkerLostError

FIND_S = 60.0
"""How long to wait for a broker that is starting or restarting."""
NOTICE_S = 15.0
"""How long the directory may take to detect a lost broker."""


@contextlib.contextmanager
def directory_or_default(directory: DirectoryClient | None, *, join: bool = False) -> Iterator[DirectoryClient]:
    """Yield `directory`, or else a temporary client: of the directory that the environment names, or, with `join`, if
    it names none, of the directory of this process's job. LookupError if there is none."""
    if directory is not None:
        yield directory
        return
    if join and not os.environ.get(DIRECTORY_VARIABLE):
        temporary = DirectoryClient(job_directory())
    else:
        temporary = DirectoryClient.from_environment()
    with temporary:
        yield temporary


def find_brokers(directory: DirectoryClient, node_rank: int | None) -> dict[int, str]:
    """Return the endpoints of brokers by the rank of their node: that of one node's broker, after waiting for it, or
    with `node_rank` None those of all present brokers (if there are none, node 0's, after waiting for it).
    `NameNotFoundError` after `FIND_S`, with a note that lists the nodes that have a broker."""
    if node_rank is None:
        brokers = _registered_brokers(directory)
        if brokers:
            return brokers
        node_rank = 0
    try:
        return {node_rank: directory.lookup_channel(broker_name(node_rank), FIND_S).endpoints[0]}
    except NameNotFoundError as error:
        nodes = list(_registered_brokers(directory))
        error.add_note(f"node {node_rank} has no channel broker; nodes with a broker: {nodes}")
        raise


def _registered_brokers(directory: DirectoryClient) -> dict[int, str]:
    """Return the endpoints of all registered brokers by the rank of their node, in the order of ranks."""
    entries = [entry for entry in directory.listing(Kind.CHANNEL) if entry.name.startswith(BROKER_NAME)]
    brokers = {int(entry.name.removeprefix(BROKER_NAME)): entry.endpoints[0] for entry in entries}
    return dict(sorted(brokers.items()))


def await_broker_change(directory: DirectoryClient, brokers: dict[int, str], until: float) -> bool:
    """Return whether the directory removed or replaced one of `brokers` (endpoints by node rank). Blocks until it does,
    at most until `until`."""
    endpoints_by_name = {broker_name(rank): endpoint for rank, endpoint in brokers.items()}
    changed = threading.Event()

    def notice_end(entry: DirectoryEntry) -> None:
        if entry.name in endpoints_by_name:
            changed.set()

    unsubscribe = directory.subscribe(notice_end)  # before the lookups, so that no end is missed
    try:
        # The directory reports the end of the entries that this client has looked up.
        for name, endpoint in endpoints_by_name.items():
            if directory.lookup_channel(name).endpoints != (endpoint,):
                return True
        return changed.wait(max(0.0, until - time.monotonic()))
    except (NameNotFoundError, WorkerLostError):  # it was removed before its lookup
        return True
    finally:
        unsubscribe()
