"""What the RayJob runs, on a cluster that `ray start` made as KubeRay makes one: a head of its own, with a token."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.children import START_S
from tests.deploy.manifests import DEPLOY, ROOT, documents
from tests.ports import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(600)]
PATIENT_RAY = """
from ray.scripts.scripts import main
from tests.ray.slow_start import allow_slow_starts
allow_slow_starts()
main()
"""
"""`ray`, which otherwise gives its processes 30 s to start."""
JOB = next(document for _, document in documents("kuberay") if document["kind"] == "RayJob")


@pytest.fixture
def cluster() -> Iterator[dict[str, str]]:
    """The environment of a driver of a new cluster."""
    directory = tempfile.mkdtemp(prefix="tqj", dir="/tmp")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TQ_"))},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONPATH": str(ROOT),
    }
    first = free_ports(2)
    ports = [f"--ray-client-server-port={first}", f"--dashboard-agent-listen-port={first + 1}"]
    command = [sys.executable, "-c", PATIENT_RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    command += ["--port=0", f"--temp-dir={directory}", "--include-dashboard=false", "--num-cpus=2", *ports]
    output = Path(directory) / "output"
    with output.open("w") as file:
        head = subprocess.Popen(
            [*command, f"--object-store-memory={100 << 20}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield {**environment, "RAY_ADDRESS": _address(head, output)}
    finally:
        head.send_signal(signal.SIGTERM)  # with --block it ends what it started
        head.wait(120)
        shutil.rmtree(directory, ignore_errors=True)


def _address(head: subprocess.Popen[bytes], output: Path) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end and head.poll() is None:
        found = re.search(r"ray start --address='([^']+)'", output.read_text())
        if found and "--block" in output.read_text():
            return found[1]
        time.sleep(0.2)
    raise AssertionError(f"no cluster: {output.read_text()[-2000:]}")


def test_the_job_runs(cluster: dict[str, str]) -> None:
    words = JOB["spec"]["entrypoint"].split()
    assert words[0] == "python"
    script = DEPLOY / "kuberay" / Path(words[1]).name
    variables = yaml.safe_load(JOB["spec"]["runtimeEnvYAML"])["env_vars"]
    assert set(variables) == {"TQ_CAPACITY_BYTES"}
    assert "TQ_CAPACITY_BYTES" in script.read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script],
        env={**cluster, "TQ_CAPACITY_BYTES": str(16 << 20)},
        cwd=cluster.get("TMPDIR", "/tmp"),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "16 rows put on 1 nodes, 16 taken\n" in done.stdout
