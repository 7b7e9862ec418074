"""A temporary service and a temporary partition, which a command creates for itself."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dataplane.errors import ServiceUnavailableError

if TYPE_CHECKING:
    from dataplane import DataPlaneClient, FieldSpec

_START_S = 60.0
"""How long to wait until the service prints its address."""
_END_S = 30.0
"""How long to wait after SIGTERM before the process is killed."""


@contextlib.contextmanager
def temporary_service(*, capacity_bytes: int, arena_dir: str = "/dev/shm") -> Iterator[str]:
    """Run a service with one unit in child processes, on loopback and without a token, and yield its address. The
    service stops at the end of the block. Raises `ServiceUnavailableError`, with its error output, if it fails or does
    not start within a minute."""
    command = [sys.executable, "-m", "dataplane", "serve", "--capacity", str(capacity_bytes), "--arena-dir", arena_dir]
    # Without the variables that configure a service. Ctrl-C does not reach its process group: this command stops it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=environment, process_group=0
    ) as process:
        try:
            yield _read_first_line(process).split()[-1]  # the address is the last word
        finally:
            _stop(process)


def _read_first_line(process: subprocess.Popen[str]) -> str:
    """Return the first line of the process's output, which has the address. Without one in time, stop the process and
    raise `ServiceUnavailableError`."""
    assert process.stdout is not None
    with_output, _, _ = select.select([process.stdout], [], [], _START_S)
    line = process.stdout.readline() if with_output else ""
    if not line:  # nothing was printed in time, or the process has ended
        reason = " ".join(_stop(process).split()) or f"it printed nothing for {_START_S:.0f} s"
        why = f"`tq serve` did not start: {reason}"
        raise ServiceUnavailableError(address="127.0.0.1", why=why)
    return line


def _stop(process: subprocess.Popen[str]) -> str:
    """Terminate the process, or kill it after `_END_S`, and return its standard error. Its units stop with it."""
    process.terminate()
    try:
        return process.communicate(timeout=_END_S)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[1]


@contextlib.contextmanager
def temporary_partition(
    client: DataPlaneClient, command: str, fields: Sequence[str] | Mapping[str, FieldSpec]
) -> Iterator[str]:
    """Register a partition, whose only task is `command`, and yield its name. The partition is dropped at the end of
    the block."""
    name = f"tq-{command}-{secrets.token_hex(6)}"
    client.register_partition(name, fields, num_samples=None, consumer_tasks=[command])
    try:
        yield name
    finally:
        client.clear_samples(None, name)  # None: the whole partition
