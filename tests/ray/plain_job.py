"""What a framework's worker does that was told nothing, and that imports nothing of `workers` (nor does this file)."""

from __future__ import annotations

import sys
from typing import Any

import torch

import dataplane.compat.transfer_queue as tq


def job(key: str) -> dict[str, Any]:
    """Put a sample and see what there is."""
    assert "workers" not in sys.modules, "what is tested is that they are found without"
    assert tq.init() is None
    try:
        tq.kv_put(key, "p", {"v": torch.tensor([1, 2, 3])}, {"from": key})
        assert tq.get_client().get_meta(["v"], 99, "p", task_name="t").size == 0
        return tq.kv_list("p")["p"]
    finally:
        tq.close()
