"""Around every test: nothing may stay in shared memory, no child process may outlive the suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from dataplane import failpoints
from dataplane.control.grpc_import import import_grpc_door
from dataplane.lockfile import is_held, open_own
from tests.gloo import four, gloo, gloo_pool, pair  # noqa: F401
from tests.profiles import budget

SHARED_MEMORY = Path("/dev/shm")

# As a service of ours does it, before a test imports grpc itself: with gRPC's fork support, which is on by default, a
# forked child dies now and then.
import_grpc_door()

settings.register_profile("ours", budget(100))
settings.load_profile("ours")

# Hypothesis tries the constants that it finds in whatever modules are loaded. Examples are the same whichever tests ran
# before only if it does not.
providers.HypothesisProvider._local_constants = providers._local_constants


def our_files() -> set[str]:
    """Arenas and session locks that are in shared memory now, by their paths in it."""
    folders = [SHARED_MEMORY, *(path for path in SHARED_MEMORY.glob("tq-*") if path.is_dir())]
    files = [path for folder in folders for path in folder.iterdir() if path.name.startswith(("tq-", ".tq-"))]
    return {str(path.relative_to(SHARED_MEMORY)) for path in files if path not in folders}


def abandoned(path: Path) -> bool:
    """Whether nobody holds the file: it is litter, not the file of some other run on this machine."""
    fd = open_own(path)
    if fd is None:
        return False
    try:
        return not is_held(fd)
    finally:
        os.close(fd)


def litter(before: set[str]) -> set[str]:
    """What came into shared memory since `before` and nobody holds."""
    return {name for name in our_files() - before if abandoned(SHARED_MEMORY / name)}


@pytest.fixture(scope="session", autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    files = our_files()
    yield
    left = litter(files)
    assert not left, f"left in /dev/shm: {sorted(left)}"
    children = psutil.Process(os.getpid()).children(recursive=True)
    ours = [child for child in children if "multiprocessing" not in " ".join(_command_line(child))]
    assert not ours, f"left running: {[(child.pid, _command_line(child)) for child in ours]}"


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(autouse=True)
def _failpoints_disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()
