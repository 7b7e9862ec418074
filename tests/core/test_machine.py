"""Files, locks, limits and addresses of the machine."""

from __future__ import annotations

import ipaddress
import os
import pickle
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from dataplane import DataPlaneConfig, PortTakenError, connect, serve
from dataplane.cli import main
from dataplane.client.checkpoint.save import StagedCheckpoint
from dataplane.config import MIB
from dataplane.controller.controller import Controller
from dataplane.controller.durable_ledger import DurableLedger, LedgerSettings
from dataplane.core import addresses as host_module
from dataplane.core import file_locks, memory_limits
from dataplane.core import ports as ports_module
from dataplane.core.addresses import (
    boot_id,
    dial,
    dialed,
    join_address,
    reachable_host,
    require_guard_beyond_loopback,
    resolve_host,
    split_address,
)
from dataplane.core.file_locks import create_locked, file_system, is_held, is_local, open_own, unlink_unheld
from dataplane.core.memory_limits import available_memory
from dataplane.core.ports import require_free_port
from dataplane.core.private_dir import in_own_directory, leave, own_directory, own_path, refuse_link_of_another
from dataplane.core.zmq_io import arrived, bind_tcp, send
from dataplane.errors import CheckpointWriteError, StateDirError
from dataplane.storage.arena import Arena
from dataplane.storage.arena_record import UnitRecord, discard
from dataplane.storage.session_lock import lock_directories
from dataplane.storage.unit import StorageUnit
from tests.ports import free_ports

# --- This user's own directory in a shared one: made for it alone, and refused if somebody else may
# have had a hand in.


SETTINGS = LedgerSettings(reserve_fraction=0.15, heartbeat_s=2.0, session_timeout_s=20.0)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_it_is_made_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = own_directory(tmp_path)
    finally:
        os.umask(before)
    assert made == own_path(tmp_path) == tmp_path / f"tq-{os.geteuid()}"
    assert mode(made) == 0o700
    assert own_directory(tmp_path) == made


def test_it_may_inherit_the_bit_of_a_volume_with_a_group(tmp_path: Path) -> None:
    tmp_path.chmod(0o2777)
    assert mode(own_directory(tmp_path)) == 0o2700
    assert own_directory(tmp_path) == own_path(tmp_path)
    leave(tmp_path)
    assert not own_path(tmp_path).exists()


@pytest.mark.integration
def test_arenas_and_locks_lie_in_it_and_are_for_this_user(tmp_path: Path) -> None:
    with serve({"capacity_bytes": MIB, "arena_dir": str(tmp_path)}) as server, connect(server.address) as client:
        client.stats()
        (arena,) = own_path(tmp_path).iterdir()
        lock = client._connections.get().session_state._lock
        assert lock is not None
        assert lock.path.parent == own_path("/dev/shm")
        assert mode(arena) == mode(lock.path) == 0o600
        assert mode(own_path(tmp_path)) == mode(own_path("/dev/shm")) == 0o700


@pytest.mark.integration
def test_the_state_of_a_service_is_for_this_user_even_in_a_directory_that_others_may_look_into(tmp_path: Path) -> None:
    before = os.umask(0)
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    try:
        with serve({"capacity_bytes": MIB, "state_dir": str(state)}) as server, connect(server.address) as client:
            client.stats()
            found = {path.name: mode(path) for path in state.iterdir()}
    finally:
        os.umask(before)
        discard(state, ["/dev/shm"])
    assert {"lock", "journal.sqlite", "journal.sqlite-wal", "unit-unit-0.json"} <= set(found)
    assert any(name.startswith("image-") for name in found)
    assert set(found.values()) == {0o600}


def link_of_another_user(link: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`link` leads to `target`, and is not this user's."""
    link.symlink_to(target)
    if os.geteuid():
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    else:
        os.lchown(link, 65534, 65534)


def test_a_state_directory_or_checkpoint_that_another_user_leads_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, link = tmp_path / "mine", tmp_path / "link"
    mine.mkdir()
    refuse_link_of_another(mine)
    refuse_link_of_another(tmp_path / "missing")
    link_of_another_user(link, mine, monkeypatch)
    with pytest.raises(StateDirError, match=rf"{link} is a symbolic link of another user \([0-9]+\): remove it"):
        DurableLedger.open(link, SETTINGS)
    with pytest.raises(PermissionError, match="is a symbolic link of another user"):
        UnitRecord(link, "unit", tmp_path, tmp_path).open(refuse_to_make, epoch=1)
    with pytest.raises(CheckpointWriteError, match="is a symbolic link of another user"):
        StagedCheckpoint(link).prepare()
    assert not list(mine.iterdir())


def refuse_to_make(path: Path) -> Arena:
    raise AssertionError(path)


def test_a_link_in_a_state_directory_that_others_write_to_is_not_followed(tmp_path: Path) -> None:
    mine, state = tmp_path / "mine", tmp_path / "state"
    mine.write_text("of value")
    mine.chmod(0o644)
    state.mkdir()
    (state / "journal.sqlite").symlink_to(mine)
    with pytest.raises(StateDirError, match=r"journal\.sqlite is a symbolic link instead of a regular file: remove it"):
        DurableLedger.open(state, SETTINGS)
    assert (mine.read_text(), mode(mine)) == ("of value", 0o644)


@pytest.mark.integration
def test_who_leaves_last_removes_it(tmp_path: Path) -> None:
    with serve({"capacity_bytes": MIB, "arena_dir": str(tmp_path)}) as server:
        with connect(server.address) as client:
            client.stats()
        assert own_path(tmp_path).exists()
    assert not own_path(tmp_path).exists()


def test_it_is_made_again_when_another_process_removes_it_meanwhile(tmp_path: Path) -> None:
    removals = iter(range(3))

    def make(folder: Path) -> Path:
        for _ in removals:
            leave(tmp_path)
            break
        (folder / "file").write_bytes(b"")
        return folder

    assert (in_own_directory(tmp_path, make) / "file").exists()
    leave(tmp_path)
    assert own_path(tmp_path).exists(), "there is something in it"


def test_it_is_looked_at_again_when_it_is_removed_just_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir, removals = os.mkdir, iter(range(3))

    def vanishing(path: Path, mode: int) -> None:
        mkdir(path, mode)
        for _ in removals:
            leave(tmp_path)
            break

    monkeypatch.setattr(os, "mkdir", vanishing)
    assert own_directory(tmp_path).exists()


def test_what_cannot_be_made_there_at_all_is_an_error(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        raise FileNotFoundError("something else")

    with pytest.raises(FileNotFoundError, match="something else"):
        in_own_directory(tmp_path, make)


@pytest.mark.integration
@pytest.mark.parametrize("wrong", ["link", "file", "mode", "owner"])
def test_one_that_another_may_have_prepared_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    path = own_path(tmp_path)
    why = {
        "link": "is a symbolic link",
        "file": "is a file",
        "mode": "has mode 0755.*chmod 700",
        "owner": f"belongs to user {os.geteuid()}",
    }
    match wrong:
        case "link":
            elsewhere = tmp_path / "elsewhere"
            elsewhere.mkdir(mode=0o700)
            path.symlink_to(elsewhere)
        case "file":
            path.write_bytes(b"")
        case "mode":
            path.mkdir()
            path.chmod(0o755)
        case "owner":
            path.mkdir(mode=0o700)
            monkeypatch.setattr(os, "geteuid", lambda: 4711)
            path = path.rename(own_path(tmp_path))
    with pytest.raises(PermissionError, match=f"{path} {why[wrong]}"):
        own_directory(tmp_path)
    with pytest.raises(PermissionError, match=str(path)):
        serve({"capacity_bytes": MIB, "arena_dir": str(tmp_path)})
    monkeypatch.setattr("dataplane.storage.session_lock.DEFAULT_LOCK_DIRECTORY", str(tmp_path))
    assert lock_directories(Path("/somewhere")) == {Path("/somewhere")}
    assert str(path) in caplog.text


# --- file locks


@pytest.fixture(params=["_create_nameless", "_create_aside"])
def created(request, tmp_path):
    path = tmp_path / "file"
    fd = getattr(file_locks, request.param)(path)
    yield path, fd
    os.close(fd)


def test_appears_locked_private_and_alone(created):
    path, fd = created
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.path.samestat(os.stat(path), os.fstat(fd))
    assert not os.get_inheritable(fd)
    assert os.listdir(path.parent) == ["file"]
    with open(path) as other:
        assert is_held(other.fileno())


def test_an_existing_name_is_never_taken_over(created):
    path, _ = created
    for create in (file_locks._create_nameless, file_locks._create_aside, create_locked):
        with pytest.raises(FileExistsError):
            create(path)
    assert os.listdir(path.parent) == ["file"]


def test_falls_back_where_there_are_no_nameless_files(tmp_path, monkeypatch):
    def unsupported(_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(file_locks, "_create_nameless", unsupported)
    fd = create_locked(tmp_path / "file")
    assert not unlink_unheld(tmp_path / "file")
    os.close(fd)
    assert unlink_unheld(tmp_path / "file")


def test_other_errors_are_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        create_locked(tmp_path / "missing" / "file")


def test_probes_do_not_mistake_each_other_for_holders(tmp_path):
    path = tmp_path / "file"
    os.close(create_locked(path))
    with open(path) as one, open(path) as two:
        file_locks.fcntl.flock(one, file_locks.fcntl.LOCK_SH)
        assert not is_held(two.fileno()), "a probe under way is no holder"


@pytest.mark.integration
def test_a_forked_child_keeps_the_lock(tmp_path):
    path = tmp_path / "file"
    fd = create_locked(path)
    ready, release = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(release[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    os.close(fd)
    with open(path) as probe:
        assert is_held(probe.fileno())
        os.write(release[1], b"x")
        os.waitpid(child, 0)
        assert not is_held(probe.fileno())
    for end in (*ready, *release):
        os.close(end)


def test_only_own_regular_files_are_opened(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "link", "pipe", "missing"):
        assert open_own(tmp_path / name) is None
    fd = open_own(tmp_path / "file")
    assert fd is not None
    os.close(fd)


def test_file_systems():
    assert file_system("/proc/self") == "proc"
    assert not is_local("/proc/self")
    assert is_local("/dev/shm")


def test_what_is_not_there_yet_is_where_its_parent_is(tmp_path):
    assert file_system(tmp_path / "none" / "here") == file_system(tmp_path) != ""


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_directories_of_a_chroot_are_local_too(tmp_path):
    (tmp_path / "shm").mkdir()
    code = "from dataplane.core.file_locks import file_system; os.chroot(sys.argv[1]); print(file_system('/shm'))"
    look = f"import os, sys; {code}"
    found = subprocess.run(
        [sys.executable, "-c", look, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == file_system(tmp_path)


# --- memory limits


GIB = 1 << 30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A stand-in for /proc and /sys/fs/cgroup: `machine.write("sys/memory.max", "100")`."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    monkeypatch.setattr(memory_limits, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory_limits, "CGROUP_ROOT", tmp_path / "sys")
    monkeypatch.setattr(memory_limits, "file_system", lambda _: "tmpfs")
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=64 * GIB // 4096, f_frsize=4096))
    write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {48 * GIB // 1024} kB\n")
    return SimpleNamespace(write=write)


def test_the_machine_bounds_shared_memory(machine):
    assert available_memory("/dev/shm").free_bytes == 48 * GIB


def test_the_file_system_bounds_a_disk(machine, monkeypatch):
    monkeypatch.setattr(memory_limits, "file_system", lambda _: "ext4")
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("sys/job/memory.max", str(GIB))
    machine.write("sys/job/memory.current", "0")
    assert available_memory("/mnt/nvme").free_bytes == 64 * GIB


def test_cgroup_v2_counts_page_cache_as_free(machine):
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.write("sys/a/b/memory.max", str(10 * GIB))
    machine.write("sys/a/b/memory.current", str(7 * GIB))
    machine.write("sys/a/b/memory.stat", f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\nshmem {4 * GIB}\n")
    found = available_memory("/dev/shm")
    assert found.free_bytes == 5 * GIB
    assert "cgroup" in found.limit
    assert f"{10 * GIB:,}" in found.limit


def test_the_tightest_parent_cgroup_counts(machine):
    machine.write("proc/self/cgroup", "0::/pod/container\n")
    machine.write("sys/pod/container/memory.max", "max")
    machine.write("sys/pod/container/memory.current", "0")
    machine.write("sys/pod/memory.max", str(2 * GIB))
    machine.write("sys/pod/memory.current", str(3 * GIB))
    assert available_memory("/dev/shm").free_bytes == 0


def test_cgroup_v1_seen_from_inside_a_container(machine):
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n")
    machine.write("sys/memory/memory.limit_in_bytes", str(4 * GIB))
    machine.write("sys/memory/memory.usage_in_bytes", str(3 * GIB))
    machine.write("sys/memory/memory.stat", f"total_inactive_file {GIB // 2}\ntotal_active_file 0\n")
    assert available_memory("/dev/shm").free_bytes == GIB + GIB // 2


def test_no_limit_is_no_bound(machine):
    machine.write("proc/self/cgroup", "4:memory:/\n")
    machine.write("sys/memory/memory.limit_in_bytes", str((1 << 63) - 4096))
    machine.write("sys/memory/memory.usage_in_bytes", "0")
    assert available_memory("/dev/shm").free_bytes == 48 * GIB


def test_the_real_machine_answers():
    found = available_memory("/dev/shm")
    assert found.free_bytes > 0
    assert found.limit


# --- Names of this host, and addresses.


def test_the_boot_id_stays() -> None:
    assert boot_id() == boot_id() != ""


@pytest.mark.parametrize("address", ["localhost:1", "10.0.0.1:65535", "[::1]:80"])
def test_addresses_split_and_join(address: str) -> None:
    assert join_address(*split_address(address)) == address


def test_a_host_beyond_loopback_needs_a_guard_and_the_refusal_names_each() -> None:
    require_guard_beyond_loopback("127.0.0.1", guarded=False)
    require_guard_beyond_loopback("localhost", guarded=False)
    require_guard_beyond_loopback("0.0.0.0", guarded=True)
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        with pytest.raises(ValueError, match=r"config\.token.*--token-file.*--insecure"):
            require_guard_beyond_loopback(host, guarded=False)


@pytest.mark.integration
def test_a_wildcard_is_told_as_an_address_that_others_can_use() -> None:
    assert reachable_host("127.0.0.1") == "127.0.0.1"
    assert reachable_host("localhost") == "localhost"
    assert not ipaddress.ip_address(reachable_host("0.0.0.0")).is_unspecified
    assert resolve_host("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(("wildcard", "loopback"), [("0.0.0.0", "127.0.0.1"), ("::", "::1")])
@pytest.mark.parametrize(
    ("there", "told"), [([], None), (["10.1.2.3"], "10.1.2.3"), (["10.1.2.3", "10.9.9.9"], "10.1.2.3, 10.9.9.9; set")]
)
def test_a_wildcard_without_a_default_route(
    wildcard: str, loopback: str, there: list[str], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "own_address", lambda towards: loopback)
    monkeypatch.setattr(host_module, "interface_addresses", lambda version: there)
    if len(there) > 1:
        with pytest.raises(ValueError, match=f"no default route.*{told}.*--host"):
            reachable_host(wildcard)
    else:
        assert reachable_host(wildcard) == (told or loopback)


@pytest.mark.integration
def test_addresses_of_interfaces_are_those_that_others_can_use() -> None:
    for version in (4, 6):
        for address in map(ipaddress.ip_address, host_module.interface_addresses(version)):
            assert address.version == version
            assert not address.is_loopback
            assert not address.is_link_local


# --- connecting


def named(*addresses: str) -> Callable[..., list[Any]]:
    """`socket.getaddrinfo` of a host with these addresses."""

    def found(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    return found


@pytest.mark.integration
@pytest.mark.parametrize("dead", [["127.0.0.9"], ["127.0.0.9", "127.0.0.8"]])
def test_a_dead_address_of_a_host_is_passed_over(dead: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(socket, "getaddrinfo", named(*dead, "127.0.0.1"))
        with dial(f"two.test:{port}", 60.0) as peer:
            assert dialed(peer) == f"127.0.0.1:{port}"


@pytest.mark.integration
def test_a_silent_address_of_a_host_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose backlog is full says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as ends:
        port = server.getsockname()[1]
        silent = ends.enter_context(socket.create_server(("127.0.0.9", port), backlog=0))
        for _ in range(2):
            full = ends.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(silent.getsockname())
        monkeypatch.setattr(socket, "getaddrinfo", named("127.0.0.9", "127.0.0.1"))
        with dial(f"two.test:{port}", 1.0) as peer:
            assert dialed(peer) == f"127.0.0.1:{port}"


@pytest.mark.integration
def test_a_host_whose_addresses_are_all_dead_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", named("127.0.0.9", "127.0.0.8"))
    with pytest.raises(ConnectionRefusedError):
        dial("two.test:1", 60.0)


# --- Ports that are taken: the error says by whom.


CONFIG = DataPlaneConfig(capacity_bytes=8 * MIB)
SELF = f"process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()})"


@pytest.fixture
def first() -> int:
    """The first of three ports that are free."""
    return free_ports(3)


@pytest.mark.integration
def test_a_port_that_is_taken_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError) as caught:
            require_free_port("127.0.0.1", port)
    error = caught.value
    assert (error.address, error.holder) == (f"127.0.0.1:{port}", SELF)
    assert str(error) == (
        f"cannot listen on 127.0.0.1:{port}: the port is in use by {SELF}. "
        "Stop the process that uses it, or choose another port."
    )
    assert isinstance(error, OSError)
    assert pickle.loads(pickle.dumps(error)).errno == error.errno
    require_free_port("127.0.0.1", port)


@pytest.mark.integration
def test_a_holder_in_another_process_is_named() -> None:
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        with pytest.raises(PortTakenError, match=rf"in use by process {holder.pid} \(python"):
            require_free_port("127.0.0.1", int(holder.stdout.readline()))


@pytest.mark.integration
def test_a_process_that_cannot_be_looked_into_is_told_by_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports_module, "_process_with", lambda link: None)
    why = f"in use by a process of user {os.geteuid()}. "
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortTakenError, match=why):
        require_free_port("127.0.0.1", taken.getsockname()[1])


@pytest.mark.integration
def test_a_kernel_that_tells_nothing_leaves_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports_module, "_TABLES", ("/nowhere",))
    why = r"the port is in use\. Stop the process"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortTakenError, match=why):
        require_free_port("127.0.0.1", taken.getsockname()[1])


@pytest.mark.integration
def test_an_address_that_is_not_here_is_no_port_that_is_taken() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:9000: Cannot assign") as caught:
        require_free_port("192.0.2.1", 9000)
    assert not isinstance(caught.value, PortTakenError)


@pytest.mark.integration
@pytest.mark.parametrize(("name", "offset"), [("ZMQ", 0), ("gRPC", 1), ("HTTP", 2)])
def test_each_port_of_a_service(name: str, offset: int, first: int) -> None:
    with socket.create_server(("127.0.0.1", first + offset)), pytest.raises(PortTakenError) as caught:
        Controller(replace(CONFIG, port=first, grpc_port=first + 1, http_port=first + 2)).start()
    assert (caught.value.address, caught.value.holder) == (f"127.0.0.1:{first + offset}", SELF)


@pytest.mark.integration
def test_the_port_of_a_unit(first: int) -> None:
    with serve(CONFIG) as server, socket.create_server(("127.0.0.1", first)):
        unit = StorageUnit(replace(CONFIG, port=first), server.address)
        with pytest.raises(PortTakenError) as caught:
            unit.start()
    assert (caught.value.address, caught.value.holder) == (f"127.0.0.1:{first}", SELF)


@pytest.mark.integration
def test_a_second_service_is_told_in_one_line_of_the_first(first: int, capsys: pytest.CaptureFixture[str]) -> None:
    with Controller(replace(CONFIG, port=first)):
        assert main(["serve", "--port", str(first), "--units", "0"]) == 1
    text = capsys.readouterr().err
    assert text == (
        f"tq: cannot listen on 127.0.0.1:{first}: the port is in use by {SELF}. "
        "Stop the process that uses it, or choose another port.\n"
    )


@pytest.mark.integration
def test_a_port_that_the_state_had_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.controller.controller.PORT_WAIT_S", 0.0)
    config = replace(CONFIG, state_dir=str(tmp_path))
    with Controller(config) as before:
        port = int(before.address.rpartition(":")[2])
    why = f"in use by process .*had port {port} before, and clients reconnect to it"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortTakenError, match=why):
        Controller(config).start()


# --- ZMQ sockets: tcp ports to bind, and what has come.


@pytest.mark.integration
@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_a_free_port_is_bound_and_what_has_come_is_read(ip: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as ours, context.socket(zmq.PUSH) as theirs:
        theirs.linger = ours.linger = 0
        port = bind_tcp(ours, ip)
        assert list(arrived(ours)) == []
        theirs.set(zmq.IPV6, 1)
        theirs.connect(f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}")
        send(theirs, [b"first", b"message"])
        assert ours.poll(60_000)
        assert [[frame.bytes for frame in frames] for frames in arrived(ours)] == [[b"first", b"message"]]


@pytest.mark.integration
def test_a_port_that_is_taken_is_an_error() -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as first, context.socket(zmq.PULL) as second:
        port = bind_tcp(first, "127.0.0.1")
        with pytest.raises(zmq.ZMQError):
            bind_tcp(second, "127.0.0.1", port)
