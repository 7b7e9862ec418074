"""`tq checkpoint` and `tq restore`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dataplane
from dataplane import connect
from dataplane.cli import main
from dataplane.config import MIB

pytestmark = pytest.mark.integration


def test_checkpoint_and_restore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "c")
    with dataplane.serve({"capacity_bytes": 8 * MIB}) as server, connect(server.address) as client:
        for name in ("train", "val"):
            client.register_partition(name, ["x"], 2, ["policy"])
            client.put_samples(["a", "b"], name, {"x": torch.arange(2)})
        assert main(["checkpoint", server.address, path, "--partition", "val", "--partition", "train"]) == 0
        assert "checkpoint of val (2 samples), train (2 samples), " in capsys.readouterr().out
        assert main(["restore", server.address, path]) == 1
        told = capsys.readouterr().err
        assert "partition 'val' exists already" in told
        assert "(--partition)" in told
        assert "(--replace)" in told
        assert "=" not in told
        client.clear_samples(["a"], "train")
        client.clear_samples(None, "val")
        assert main(["restore", server.address, path, "--partition", "train", "--replace"]) == 0
        assert capsys.readouterr().out.startswith("restored train (2 samples), ")
        assert client.list_samples("train").sample_ids == ["a", "b"]
        assert [found.partition for found in client.stats().partitions] == ["train"]
        assert main(["checkpoint", server.address, path, "--partition", "none"]) == 1
        assert "unknown partition 'none'" in capsys.readouterr().err
        (tmp_path / "c" / "manifest.json").unlink()
        assert main(["restore", server.address, path]) == 1
        assert "manifest.json: the file is missing" in capsys.readouterr().err
