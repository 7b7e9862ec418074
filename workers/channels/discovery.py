"""Which brokers there are, as the job's directory knows."""

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
"""How long a broker that is being started, or started again, is waited for."""
NOTICE_S = 15.0
"""How long the directory may take to find out that a broker is gone."""


@contextlib.contextmanager
def opened(directory: DirectoryClient | None, *, join: bool = False) -> Iterator[DirectoryClient]:
    """`directory`, or for as long as it takes the one that the environment names, or else, with `join`, that of this
    process's job. LookupError where there is none."""
    if directory is not None:
        yield directory
        return
    address = os.environ.get(DIRECTORY_VARIABLE)
    with DirectoryClient(job_directory()) if join and not address else DirectoryClient.from_environment() as own:
        yield own


def find_brokers(directory: DirectoryClient, node_rank: int | None) -> dict[int, str]:
    """Endpoints by node: of one node's broker, waited for, or of all that there are (of node 0's, where there is none).
    `NameNotFoundError` after `FIND_S`, which has a note of the nodes that have one."""
    if node_rank is None:
        found = _brokers(directory)
        if found:
            return found
        node_rank = 0
    try:
        return {node_rank: directory.lookup_channel(broker_name(node_rank), FIND_S).endpoints[0]}
    except NameNotFoundError as error:
        error.add_note(f"it is the broker of channels on node {node_rank}; nodes {list(_brokers(directory))} have one")
        raise


def _brokers(directory: DirectoryClient) -> dict[int, str]:
    entries = [each for each in directory.listing(Kind.CHANNEL) if each.name.startswith(BROKER_NAME)]
    found = {int(each.name.removeprefix(BROKER_NAME)): each.endpoints[0] for each in entries}
    return dict(sorted(found.items()))


def await_others(directory: DirectoryClient, brokers: dict[int, str], until: float) -> bool:
    """Whether the directory has one of `brokers` no more, or another in its place; waits for it until then."""
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
