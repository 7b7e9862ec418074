import os
from types import SimpleNamespace

import pytest

from dataplane.core import memory_limits
from dataplane.core.memory_limits import available_memory

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
