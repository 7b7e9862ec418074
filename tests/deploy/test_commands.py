"""The commands of the manifests, run here: the controller's and a unit's, with the probes of their pods, the trainer's
script, and what the pages say becomes of a container that ends."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane
from dataplane.storage.arena_record import discard
from tests.deploy.manifests import containers, documents, pod_templates
from tests.ports import free_ports

pytestmark = pytest.mark.slow
TOKEN = "a token of this test"
PODS = {
    template["metadata"]["labels"].get("tq-kind", "controller"): template
    for _, document in documents("kubernetes")
    for template in pod_templates(document)
}


class Pods:
    """What Kubernetes would do with the containers, but all on loopback, with little memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ports = dict(zip((7040, 7041, 7043, 7044), itertools.count(free_ports(4)), strict=False))
        self.address = f"127.0.0.1:{self._ports[7040]}"
        self.running: list[subprocess.Popen[str]] = []
        (directory / "token").write_text(TOKEN)

    def words(self, kind: str) -> list[str]:
        """The arguments of the pod's `tq` container, as they have to be here."""
        (arguments,) = [one["args"] for one in containers(PODS[kind]) if "command" not in one]
        return [self._here(kind, word) for word in arguments]

    def _here(self, kind: str, word: str) -> str:
        for there, here in {
            "tq-controller:7040": self.address,
            "0.0.0.0": "127.0.0.1",
            "/etc/tq": str(self._directory),
            "/var/lib/tq": str(self._directory / kind),
            "$(POD_NAME)": "tq-unit-0",
            "=8g": "=8m",
        }.items():
            word = word.replace(there, here)
        return re.sub(r"(?<=port=)\d+", lambda found: str(self._ports[int(found[0])]), word)

    def start(self, kind: str) -> subprocess.Popen[str]:
        """Run the pod's container until it says that it is ready."""
        command = [sys.executable, "-m", "dataplane", *self.words(kind)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    def probe(self, probe: dict[str, Any], container: dict[str, Any]) -> bool:
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        port = self._ports[named[probe["httpGet"]["port"]]]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{probe['httpGet']['path']}", timeout=60) as answer:
            return bool(answer.status == 200)

    def is_healthy(self, kind: str) -> bool:
        (container,) = [one for one in containers(PODS[kind]) if "command" not in one]
        probes = [probe for name, probe in container.items() if name.endswith("Probe")]
        assert probes
        return all(self.probe(probe, container) for probe in probes)

    def end(self) -> None:
        for process in reversed(self.running):
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    made = Pods(tmp_path)
    yield made
    made.end()
    for kind in ("set", "trainer"):
        discard(tmp_path / kind / "state", ["/dev/shm"])


def test_controller_and_unit_answer_their_probes_and_come_back_with_their_rows(pods: Pods) -> None:
    controller = pods.start("controller")
    unit = pods.start("set")
    assert pods.is_healthy("controller")
    assert pods.is_healthy("set")
    with dataplane.connect(pods.address, token=TOKEN, heartbeat_s=0.2) as client:
        client.register_partition("train", ["x"], None, ["policy"])
        client.put_samples(["a", "b"], "train", {"x": [torch.arange(2), torch.arange(3)]})
        for process, kind in ((unit, "set"), (controller, "controller")):
            os.kill(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
            pods.running.remove(process)
            pods.start(kind)
            assert pods.is_healthy(kind)
            rows = client.get_samples(["a", "b"], "train", ["x"])["x"].unbind()
            assert [row.tolist() for row in rows] == [[0, 1], [0, 1, 2]]
        assert [found.name for found in client.stats().units] == ["tq-unit-0"]


def test_metrics_want_the_token(pods: Pods) -> None:
    pods.start("controller")
    (word,) = [word for word in pods.words("controller") if word.startswith("--http-port=")]
    request = urllib.request.Request(f"http://127.0.0.1:{word.partition('=')[2]}/metrics")
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(request, timeout=60)
    refused.value.close()
    request.add_header("Authorization", f"Bearer {TOKEN}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert b"tq_" in answer.read()


def test_the_trainers_script_runs_beside_its_unit(pods: Pods) -> None:
    pods.start("controller")
    pods.start("trainer")
    (trainer,) = [one for one in containers(PODS["trainer"]) if "command" in one]
    assert trainer["command"] == ["python", "-c"]
    (script,) = [pods._here("trainer", text) for text in trainer["args"]]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "tq-unit-0" in done.stdout
