"""Fixtures of the mixin's tests, on the service of `tests.service`: a partition for each test, and a worker without
siblings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from dataplane import DataPlaneClient, FieldSpec, Server
from tests.workers.training.mixin_worker import LAYOUTS, LENGTHS, Worker

_numbers = itertools.count()


@pytest.fixture
def partition(client: DataPlaneClient) -> Iterator[str]:
    name = f"p{next(_numbers)}"
    fields = {
        **dict.fromkeys(["input_ids", "generation_logprobs", "token_mask", "routed_experts"]),
        "fp8": FieldSpec("jagged"),
        "declared": FieldSpec("jagged", "float32", (6,)),
        "prev_logprobs": None,
        "reference_policy_logprobs": None,
    }
    client.register_partition(name, fields, len(LENGTHS), ["train"])
    yield name
    client.clear_samples(None, name)


@pytest.fixture
def alone(server: Server) -> Iterator[Worker]:
    worker = Worker(LAYOUTS["dp2"], 0)
    worker.setup_data_plane({"address": server.address})
    yield worker
    worker.close_data_plane()
