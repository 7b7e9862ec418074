"""Lookup of brokers in the job's directory."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from workers.channels.jobs import job_directory
from workers.channels.settings import BROKER_NAME, broker_name
from workers.directory import DIRECTORY_VARIABLE, DirectoryClient, Kind
from workers.errors import NameNotFoundError, WorkerLostError

FIND_S = 60.0
"""How long to wait for a broker that is starting or restarting."""
NOTICE_S = 15.0
"""How long the directory may take to detect a lost broker."""


@contextlib.contextmanager
def opened(directory: DirectoryClient | None, *, join: bool = False) -> Iterator[DirectoryClient]:
    """Yield `directory`, or else a temporary client: of the directory that the environment names, or with `join` of
    this process's job. LookupError if there is none."""
    if directory is not None:
        yield directory
        return
    address = os.environ.get(DIRECTORY_VARIABLE)
    with DirectoryClient(job_directory()) if join and not address else DirectoryClient.from_environment() as own:
        yield own


def find_brokers(directory: DirectoryClient, node_rank: int | None) -> dict[int, str]:
    """Return endpoints by node: that of one node's broker, after waiting for it, or those of all present brokers (of
    node 0's if there are none). `NameNotFoundError` after `FIND_S`, with a note that lists the nodes that have a
    broker."""
    if node_rank is None:
        found = _brokers(directory)
        if found:
            return found
        node_rank = 0
    try:
        return {node_rank: directory.lookup_channel(broker_name(node_rank), FIND_S).endpoints[0]}
    except NameNotFoundError as error:
        error.add_note(f"node {node_rank} has no channel broker; nodes with a broker: {list(_brokers(directory))}")
        raise


def _brokers(directory: DirectoryClient) -> dict[int, str]:
    entries = [each for each in directory.listing(Kind.CHANNEL) if each.name.startswith(BROKER_NAME)]
    found = {int(each.name.removeprefix(BROKER_NAME)): each.endpoints[0] for each in entries}
    return dict(sorted(found.items()))


def await_others(directory: DirectoryClient, brokers: dict[int, str], until: float) -> bool:
    """Return whether the directory removed or replaced one of `brokers`. Blocks for this until `until`."""
    names = {broker_name(rank): endpoint for rank, endpoint in brokers.items()}
    gone = threading.Event()
    unsubscribe = directory.subscribe(lambda entry: gone.set() if entry.name in names else None)
    try:
        for name, endpoint in names.items():
            if directory.lookup_channel(name).endpoints != (endpoint,):
                return True
        return gone.wait(max(0.0, until - time.monotonic()))
    except (NameNotFoundError, WorkerLostError):
        return True
    finally:
        unsubscribe()
