"""What the adapter declares of fields holds for partitions that others made anew."""

from __future__ import annotations

import pytest
import torch

from dataplane import connect, serve
from dataplane.compat.transfer_queue import operations

pytestmark = pytest.mark.integration


def test_a_field_that_went_with_its_partition_is_declared_again() -> None:
    with serve({"capacity_bytes": 8 << 20}) as server, connect(server.address) as one, connect(server.address) as two:
        for turn in range(2):
            two.clear_samples(None, "p")
            two.register_partition("p", [], None, [])
            for name, shapes in (("a", [(2, 3)]), ("b", [(2, 3)]), ("c", [(4, 5)])):
                images = {"image": [torch.full(shape, float(turn)) for shape in shapes]}
                one.perform(operations.put, [name], "p", images)
        rows = two.get_samples(["a", "c"], "p", ["image"])["image"]
        assert [tuple(row.shape) for row in rows] == [(2, 3), (4, 5)]
