"""Around every test: nothing may stay in shared memory, no child process may outlive the suite, and only tests with a
mark of `IMPURE` may open sockets and start processes."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from xdist.remote import Producer
from xdist.scheduler.loadscope import LoadScopeScheduling

from dataplane.config import DataPlaneConfig
from dataplane.core import failpoints
from dataplane.core.file_locks import is_unheld
from dataplane.protocol.grpc_loader import import_with_grpc
from tests.children import START_S
from tests.gloo import four, gloo, gloo_pool, pair  # noqa: F401
from tests.isolation import SHARED_MEMORY, Outside, default_signals, own_shared_memory
from tests.parallel import ByPlace, rank
from tests.profiles import budget
from tests.restarts import WAIT_S, wait_until

END_S = 300.0
"""How long the test process may take to end after its last test."""
IMPURE = ("integration", "slow", "ray", "gpu", "browser")
"""Marks of tests that may open sockets and start processes."""

# As a service of ours does it, before a test imports grpc itself: with gRPC's fork support, which is on by default, a
# forked child dies now and then.
import_with_grpc("dataplane.controller.grpc_server")

# A test process may stand still on a busy machine for longer than users wait for a connection.
DataPlaneConfig.__init__.__kwdefaults__["connect_timeout_s"] = WAIT_S

# Ray ends what has not started after 30 s, or 60; the rest is in tests/ray/slow_start.py.
os.environ |= {
    "RAY_gcs_server_port_wait_time_s": f"{START_S:.0f}",
    "RAY_raylet_start_wait_time_s": f"{START_S:.0f}",
    "RAY_worker_register_timeout_seconds": f"{START_S:.0f}",
    "RAY_agent_register_timeout_ms": f"{1000 * START_S:.0f}",
}

settings.register_profile("ours", budget(100))
settings.load_profile("ours")

# Hypothesis tries the constants that it finds in whatever modules are loaded. Examples are the same whichever tests ran
# before only if it does not.
providers.HypothesisProvider._local_constants = providers._local_constants


def our_files() -> set[str]:
    """Arenas and session locks that are in shared memory now, by their paths in it."""
    folders = [SHARED_MEMORY, *(path for path in SHARED_MEMORY.glob("tq-*") if path.is_dir())]
    files: list[Path] = []
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):  # who left last has removed it
            files += [path for path in folder.iterdir() if path.name.startswith(("tq-", ".tq-"))]
    return {str(path.relative_to(SHARED_MEMORY)) for path in files if path not in folders}


def litter(before: set[str]) -> set[str]:
    """What came into shared memory since `before` and nobody holds."""
    return {name for name in our_files() - before if is_unheld(SHARED_MEMORY / name)}


def pytest_configure() -> None:
    default_signals()
    own_shared_memory()
    Outside(_refuse)


def pytest_unconfigure() -> None:
    """A thread or a process that does not end must not keep the run from ending."""
    faulthandler.dump_traceback_later(END_S, exit=True, file=sys.__stderr__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return ByPlace(config, log)


class _Test:
    """The test that runs."""

    name = ""
    pure = False
    others: frozenset[threading.Thread] = frozenset()
    """Threads that tests before it left: clients that wait to be collected, or whose service has just ended."""


def _refuse(what: str) -> None:
    if _Test.pure and threading.current_thread() not in _Test.others:
        pytest.fail(f"{_Test.name} did {what}: mark it `integration`")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _Test.others = frozenset(threading.enumerate()) - {threading.current_thread()}
    _Test.name, _Test.pure = item.nodeid, not any(item.get_closest_marker(name) for name in IMPURE)
    try:
        return (yield)
    finally:
        _Test.pure = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Fixtures end here that other tests needed."""
    _Test.pure = False


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A child that a test forks, and in which something raises, ends: else it would go on as a second test process."""
    process = os.getpid()
    try:
        return (yield)
    finally:
        if os.getpid() != process:
            traceback.print_exc()
            os._exit(1)


@pytest.fixture(scope="session", autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    files = our_files()
    yield
    wait_until(lambda: not litter(files), lambda: f"nothing left in /dev/shm but {sorted(litter(files))}")
    wait_until(lambda: not _children(), lambda: f"an end of the children {_children()}")


def _children() -> list[tuple[int, list[str]]]:
    """Number and command of those that a test started and that run, or that nobody has waited for."""
    found = [(child.pid, _command_line(child)) for child in psutil.Process(os.getpid()).children(recursive=True)]
    return [(number, command) for number, command in found if "multiprocessing" not in " ".join(command)]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(autouse=True)
def _failpoints_disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()
