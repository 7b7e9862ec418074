"""`tq doctor`: checks of this machine, the installed packages and a running service."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from dataplane.cli.flags import Address, Json, TargetFlags
from dataplane.cli.output import console, counted, print_json, readable, shown
from dataplane.config import MIB, DataPlaneConfig

if TYPE_CHECKING:
    from dataplane.ledger import commands as c

ENOUGH_BYTES = 256 * MIB
"""Minimum of free shared memory and free memory for a passing check."""
ENOUGH_FILES = 4096
"""Minimum open-file limit. A service has a few open files per session, a client about fifteen."""
_ROW_BYTES = 64 << 10
"""Size of the row of a round trip."""
_PUT_S = 10.0
"""Time limit of a put that waits for space."""
_OTHER_DIRECTORY = "pass an existing local directory that only this user can write with --arena-dir"
_MORE_SHM = (
    "enlarge it: `mount -o remount,size=16g /dev/shm`, in a container `docker run --shm-size=16g` or "
    "an emptyDir of medium Memory at /dev/shm; or pass another local directory with --arena-dir"
)
_MORE_FILES = "raise it: `ulimit -Hn 65536`, LimitNOFILE= of systemd, or docker run --ulimit nofile=65536"
_REACH = (
    "check that `tq serve` runs there and responds, listens beyond loopback (--host) and has this "
    "version; pass its token (--token-file) or certificates; check firewalls"
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The subject of a check (`what`), its result (`found`), and the remedy (`mend`; "" if the
    check passed)."""

    what: str
    found: str
    mend: str

    @property
    def ok(self) -> bool:
        """Whether the check passed."""
        return not self.mend


Check = Callable[[], tuple[str, str]]
"""Returns what was found and the remedy ("": the check passed)."""


def doctor(
    *,
    address: Address = None,
    arena_dir: Annotated[str, typer.Option(metavar="DIR", help="Local directory for arenas.")] = "/dev/shm",
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Check this machine, the installed packages and, with an address, a running service for problems.

    Prints the finding of each check, and how to fix a problem. Exit code 1 if a check fails.
    """
    config = target.config_if_any("doctor", address)
    findings = []
    for finding in run_checks(config, arena_dir):
        findings.append(finding)
        if not json:
            _print_finding(finding)
    failed = [finding for finding in findings if not finding.ok]
    if json:
        rows = [{**asdict(finding), "ok": finding.ok} for finding in findings]
        print_json({"wrong": len(failed), "findings": rows})
    elif failed:
        print(f"\n{len(failed)} of {len(findings)} checks failed")
    else:
        print(f"\nall {len(findings)} checks passed")
    return 1 if failed else 0


def run_checks(config: DataPlaneConfig, arena_dir: str) -> Iterator[Finding]:
    """Yield the finding of each check. An exception becomes a failed finding with the check's remedy."""
    checks: list[tuple[str, Check, str]] = [
        ("shared memory", lambda: _check_shared_memory(arena_dir), _OTHER_DIRECTORY),
        ("memory limit", _check_memory_limit, "make /proc and /sys/fs/cgroup readable"),
        ("arenas", lambda: _check_arenas(arena_dir), _OTHER_DIRECTORY),
        ("open files", _check_open_files, _MORE_FILES),
        ("imports", _check_imports, "correct TQ_REPLACE, or unset it"),
        ("ZMQ", _check_zmq, "pip install -U --only-binary :all: pyzmq"),
        ("torch", _check_torch, "pip install -U torch"),
    ]
    if config.address is not None:
        checks.append(("service", lambda: _check_service(config), _REACH))
    for what, check, remedy in checks:
        try:
            found, mend = check()
        except Exception as error:
            found = str(error) or type(error).__name__
            mend = remedy
        yield Finding(what=what, found=found, mend=mend)


def _check_shared_memory(arena_dir: str) -> tuple[str, str]:
    """Check the free space of the file system that has the arenas."""
    from dataplane.core.file_locks import file_system
    from dataplane.storage.arena import default_capacity
    from dataplane.storage.capacity import growing_arenas

    usage = os.statvfs(arena_dir)
    free = usage.f_bavail * usage.f_frsize
    found = f"{arena_dir} ({file_system(arena_dir)}): {readable(free)} free"
    if free < ENOUGH_BYTES:
        return f"{found}: too little", _MORE_SHM
    promised = sum(growing_arenas(arena_dir).values())
    if promised:
        found += f"; running storage units may still take {readable(promised)}"
    default = default_capacity(arena_dir, promised_bytes=promised)
    return f"{found}; the default capacity of a unit is {readable(default)}", ""


def _check_memory_limit() -> tuple[str, str]:
    """Check the free memory under the tightest cgroup limit of this process."""
    from dataplane.core.memory_limits import cgroup_limits

    limits = cgroup_limits()
    if not limits:
        return "no cgroup limits this process", ""
    tightest = min(limits, key=lambda limit: limit.free_bytes)
    found = f"{readable(tightest.free_bytes)} left of {tightest.limit}, which includes arenas"
    enough = tightest.free_bytes >= ENOUGH_BYTES
    return found, "" if enough else "raise the container's memory limit, or stop processes in it"


def _check_arenas(arena_dir: str) -> tuple[str, str]:
    """Check this user's private directory, and for arenas that killed storage units left there."""
    from dataplane.core.private_dir import leave, own_directory
    from dataplane.storage.arena import leftovers

    folder = own_directory(arena_dir)
    left = leftovers(folder)
    if not left:
        leave(arena_dir)  # removes the directory if it is empty
        return f"{folder} has no leftover arenas of killed storage units", ""
    found = f"{folder}: killed storage units left {counted(len(left), 'arena')}, among them {left[0].name}"
    return found, "the next storage unit that starts there removes them (`tq serve`)"


def _check_open_files() -> tuple[str, str]:
    """Check the hard limit of open files, up to which a service raises its own limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return "no hard limit", ""
    return f"hard limit {hard:,} per process", _MORE_FILES if hard < ENOUGH_FILES else ""


def _check_imports() -> tuple[str, str]:
    """Check whether the compat switch is on and effective. Raises ValueError for an invalid value."""
    from dataplane.compat.switch import HOOK, MODULES, VARIABLE, names_in, replaced

    value = os.environ.get(VARIABLE)
    if not value:
        return f"{VARIABLE} is not set: no modules of other packages are replaced", ""
    names = names_in(value)
    if all(replaced(name) for name in names):
        pairs = ", ".join(f"{name} is {MODULES[name]}" for name in names)
        return f"{pairs} ({VARIABLE}={value})", ""
    found = f"{VARIABLE}={value} has no effect: Python did not read {HOOK} at its start"
    return found, "pip install --force-reinstall --no-deps rl-dataplane"


def _check_zmq() -> tuple[str, str]:
    """Check that libzmq has the features that connections need."""
    import zmq

    found = f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}"
    lacking = [name for name in ("curve", "ipc") if not zmq.has(name)]
    if not lacking:
        return f"{found}, with CURVE and ipc", ""
    remedy = "pip install -U --force-reinstall --only-binary :all: pyzmq (wheels support both)"
    return f"{found}, without {' and '.join(lacking)}", remedy


def _check_torch() -> tuple[str, str]:
    """Report the version of torch and the accelerators that it can use."""
    import torch

    from dataplane.core import devices

    platform = devices.platform()
    if platform is None:
        return f"{torch.__version__}, tensors on CPUs only", ""
    names = {platform.get_device_name(number) for number in range(platform.device_count())}
    return f"{torch.__version__}, {platform.device_count()} of {', '.join(sorted(names))}", ""


def _check_service(config: DataPlaneConfig) -> tuple[str, str]:
    """Open a session, check the storage units, and put a row and get it back, over the best
    connection (shared memory if possible) and over ZMQ."""
    from dataplane import DataPlaneClient
    from dataplane.core.addresses import boot_id

    with DataPlaneClient(config).connect() as client:
        units = client.stats().units
    if not units:
        return "no storage unit: puts cannot succeed", "start one: `tq unit ADDRESS`"
    problems = [f"unit {unit.unit} {unit.name} {_unit_problem(unit)}" for unit in units if _unit_problem(unit)]
    if problems:
        return "; ".join(problems), "check the unit's log and its host's memory, clear consumed samples, or add a unit"
    on_this_host = sum(unit.host == boot_id() for unit in units)
    best_ms = _time_round_trip(config, remote=False)
    zmq_ms = _time_round_trip(config, remote=True)
    return (
        f"{counted(len(units), 'storage unit')}, {on_this_host} on this host; {readable(_ROW_BYTES)} put "
        f"and read in {best_ms:.1f} ms over the best connection and in {zmq_ms:.1f} ms over ZMQ"
    ), ""


def _unit_problem(unit: c.UnitStats) -> str:
    """Return what is wrong with a storage unit, or ""."""
    if not unit.connected:
        return "is not connected"
    if unit.problem:
        return f"cannot grow: {unit.problem}"
    return f"is filling up: {readable(unit.used_bytes)} used" if unit.pressed else ""


def _time_round_trip(config: DataPlaneConfig, *, remote: bool) -> float:
    """Put a row into a partition of its own and read it back. Return the time in milliseconds."""
    import torch

    from dataplane import DataPlaneClient

    row = torch.randint(0, 256, (_ROW_BYTES,), dtype=torch.uint8)
    with DataPlaneClient(replace(config, force_remote=remote, put_timeout_s=_PUT_S)).connect() as client:
        name = f"tq-doctor-{os.urandom(6).hex()}"
        client.register_partition(name, ["bytes"], num_samples=None, consumer_tasks=[])
        try:
            began = time.monotonic()
            client.put_samples(["row"], name, {"bytes": [row]})
            back = client.get_samples(["row"], name, ["bytes"])["bytes"].values()  # of a nested tensor with one row
            took_ms = (time.monotonic() - began) * 1000
        finally:
            client.clear_samples(None, name)
    if not torch.equal(back, row):
        raise ValueError("the bytes that were read differ: check the memory, disk and network of both machines")
    return took_ms


def _print_finding(finding: Finding) -> None:
    from rich.text import Text

    if finding.ok:
        mark = ("ok   ", "green")
    else:
        mark = ("WRONG", "bold red")
    line = Text.assemble(mark, f"  {shown(finding.what)}: {shown(finding.found)}")
    if finding.mend:
        line.append(f"\n       fix: {shown(finding.mend)}", style="yellow")
    console().print(line, soft_wrap=True)
