import os
import stat
import subprocess
import sys

import pytest

from dataplane.core import file_locks
from dataplane.core.file_locks import create_locked, file_system, is_held, is_local, open_own, unlink_unheld


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
