"""`tq bench`, and the services that verbs start for themselves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane import DataPlaneClient, ServiceUnavailableError, connect
from dataplane.cli import bench as bench_module
from dataplane.cli import local_service, main
from dataplane.cli.bench_runner import Measure
from dataplane.cli.local_service import temporary_service
from dataplane.config import MIB, DataPlaneConfig
from tests.cli.service import filled  # noqa: F401

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "_QUICK_S", 0.01)
    monkeypatch.delenv("TQ_ADDRESS", raising=False)


@pytest.mark.slow
def test_a_service_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:4] == ["what", "times", "median", "ms"]
    assert [row.split("  ")[0] for row in rows] == [
        "ask for statistics",
        "put 1 row of 1 KiB",
        "get 1 row of 1 KiB",
        "claim 1 sample",
        "put 16 rows of 1 MiB",
        "get 16 rows of 1 MiB",
        "put 1024 rows of 4 KiB",
        "get 1024 rows of 4 KiB",
        "put 16 rows of 1 MiB over ZMQ",
        "get 16 rows of 1 MiB over ZMQ",
    ]


def test_a_service_at_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    with temporary_service(capacity_bytes=128 * MIB) as address, connect(address) as client:
        client.register_partition("train", ["x"], None, ["policy"])
        assert main(["bench", address, "--quick", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["cpus"]
        for measure in told["measures"]:
            assert measure["count"] >= 5
            assert 0 < measure["median_ms"] <= measure["p99_ms"]
        assert {measure["nbytes"] for measure in told["measures"]} == {0, 1024, 4 * MIB, 16 * MIB}
        assert [part.partition for part in client.stats().partitions] == ["train"]


def test_a_service_without_space_is_exit_1(
    filled: DataPlaneClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["bench", str(filled.config.address), "--quick"]) == 1
    assert capsys.readouterr().err.startswith("tq: ")
    assert [part.partition for part in filled.stats().partitions] == ["train"]


def test_speeds_are_at_the_median() -> None:
    measure = Measure(what="x", count=5, samples=10, nbytes=2_000_000, median_ms=2.0, p99_ms=4.0)
    assert measure.mb_per_s == 1000.0
    assert measure.samples_per_s == 5000.0


@pytest.mark.slow
def test_a_service_of_its_own_needs_no_token_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_TOKEN", "secret")
    with (
        temporary_service(capacity_bytes=8 * MIB) as address,
        DataPlaneClient(DataPlaneConfig(address=address)) as client,
    ):
        assert len(client.stats().units) == 1
    with pytest.raises(ServiceUnavailableError):
        DataPlaneClient(DataPlaneConfig(address=address)).connect()


@pytest.mark.slow
def test_a_service_that_does_not_start_says_why(tmp_path: Path) -> None:
    directory = str(tmp_path / "none")
    with (
        pytest.raises(ServiceUnavailableError, match="`tq serve` did not start"),
        temporary_service(capacity_bytes=8 * MIB, arena_dir=directory),
    ):
        pass


@pytest.mark.slow
def test_a_service_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the verb would wait for it for ever."""
    monkeypatch.setattr(local_service, "_END_S", 0.2)
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert local_service._read_first_line(process) == "ready\n"
            assert local_service._stop(process) == ""
            assert process.returncode == -signal.SIGKILL
        finally:
            process.kill()
