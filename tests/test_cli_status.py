"""`tq status`."""

from __future__ import annotations

import json

import pytest
import torch

from dataplane import connect, serve
from dataplane.cli import main
from dataplane.config import MIB

pytestmark = pytest.mark.integration


def test_partitions_fields_and_tasks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serve({"capacity_bytes": 8 * MIB}) as server, connect(server.address) as client:
        client.register_partition("train", ["x"], 4, ["policy"], budget_bytes=MIB)
        client.put_samples(["a", "b"], "train", {"x": torch.arange(2)})
        client.claim_meta("train", "policy", ["x"], 1)
        monkeypatch.setenv("TQ_ADDRESS", server.address)
        assert main(["status"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"data plane service at {server.address}, epoch ")
        for part in (
            "partition train: 2 live (64 B), 2 of 4 born",
            "64 B of a budget of 1.0 MiB used",
            "field x: 2 produced",
            "task policy: 1 of 2 claimed",
        ):
            assert part in text
        assert main(["status", "--json", "--address", server.address]) == 0
        assert json.loads(capsys.readouterr().out)["partitions"][0]["produced"] == {"x": 2}
