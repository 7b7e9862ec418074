import os
import re
from pathlib import Path

import pytest

from dataplane.core.addresses import boot_id
from dataplane.core.file_locks import new_session_lock_name, sweep
from dataplane.core.private_dir import own_path
from dataplane.storage.session_lock import PeerLock, SessionLock

SHM = own_path("/dev/shm")


@pytest.fixture
def lock():
    with SessionLock.create() as made:
        yield made


def test_a_lock_is_held_until_closed(lock):
    assert re.fullmatch(rf"/dev/shm/tq-{os.geteuid()}/tq-session-[0-9a-f]{{32}}\.lock", str(lock.path))
    peer = PeerLock.open(str(lock.path), directories=[SHM])
    assert isinstance(peer, PeerLock)
    assert peer.held()
    lock.close()
    lock.close()
    assert not lock.held
    assert not peer.held()
    assert not lock.path.exists()
    peer.bury()
    peer.drop()


@pytest.mark.integration
def test_the_name_stays_while_a_forked_child_holds_the_lock(lock):
    """A storage unit that is restarted meanwhile finds by the name that somebody may still have views."""
    end = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(end[0], 1)
        os._exit(0)
    lock.close()
    peer = PeerLock.open(str(lock.path), directories=[SHM])
    assert isinstance(peer, PeerLock)
    assert peer.held()
    os.write(end[1], b"x")
    os.waitpid(child, 0)
    assert not peer.held()
    peer.bury()
    assert not lock.path.exists()
    for fd in end:
        os.close(fd)


@pytest.mark.integration
def test_a_forked_child_cannot_drop_the_parents(lock):
    peer = PeerLock.open(str(lock.path), directories=[SHM])
    assert isinstance(peer, PeerLock)
    child = os.fork()
    if child == 0:
        lock.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert lock.path.exists()
    assert peer.held()
    peer.drop()


def test_a_path_from_the_wire_is_opened_only_if_it_is_a_session_lock(lock, tmp_path):
    def why(path, *directories):
        answer = PeerLock.open(str(path), directories=directories or [SHM])
        assert isinstance(answer, str)
        return answer

    assert "directory" in why("/etc/passwd")
    assert "directory" in why(SHM / "tq-session-x.lock")
    assert "directory" in why(f"{SHM}/../{SHM.name}/{lock.path.name}")
    assert "directory" in why(lock.path, tmp_path)
    assert "directory" in why(lock.path.name)
    assert "local file system" in why(Path("/proc") / lock.path.name, Path("/proc"))
    assert "not found" in why(SHM / new_session_lock_name())
    link = tmp_path / new_session_lock_name()
    link.symlink_to(lock.path)
    assert "not found" in why(link, tmp_path)
    unheld = tmp_path / new_session_lock_name()
    unheld.write_bytes(b"")
    assert "not held" in why(unheld, tmp_path)


def test_sweep_removes_locks_of_the_dead_only(tmp_path):
    dead = tmp_path / new_session_lock_name()
    dead.write_bytes(b"")
    with SessionLock.create(tmp_path) as held:
        assert sweep(tmp_path) == [dead]
        assert held.path.exists()


def test_boot_id_is_one_line():
    assert re.fullmatch(r"[0-9a-f-]{36}", boot_id())
