"""A small run to look at: rollouts wrote, a reference model took some, the policy waits for what is not there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from dataplane import ClientClosedError, DataPlaneClient, Server, connect

SAMPLES = 24
REWARDED = 16
LEASED = 8
CLAIMED = 4
FIELDS = ["input_ids", "reward", "logprobs"]


def ids(count: int = SAMPLES) -> list[str]:
    return [f"sample-{number}" for number in range(count)]


def produce(client: DataPlaneClient, partition: str = "train") -> None:
    """24 samples, of which 16 have a reward and none has logprobs; the reference task has 8 on lease and 4 for good."""
    client.register_partition(partition, FIELDS, num_samples=64, consumer_tasks=["reference", "policy"])
    rows = [torch.arange(100 + number) for number in range(SAMPLES)]
    versions = [{"weight_version": 3}] * SAMPLES
    client.put_samples(ids(), partition, {"input_ids": rows}, tags=versions)
    client.put_samples(ids(REWARDED), partition, {"reward": torch.ones(REWARDED)})
    client.set_version(partition, 4)
    leased = client.claim_meta(partition, "reference", ["input_ids"], LEASED, lease_s=300.0)
    client.claim_meta(partition, "reference", ["input_ids"], CLAIMED)
    client.get_data(leased, ["input_ids"])
    client.list_samples(partition)  # the service knows by now that the read has ended


@contextlib.contextmanager
def waiting(server: Server, partition: str = "train", task: str = "policy", name: str = "policy-0") -> Iterator[None]:
    """Meanwhile a client waits for four samples with logprobs, for 2 h 30 min. The service has its claim by then."""
    client = connect(server.address, client_name=name)

    def claim() -> None:
        with contextlib.suppress(ClientClosedError):
            client.claim_meta(partition, task, ["input_ids", "logprobs"], 4, timeout_s=9000.0)

    thread = threading.Thread(target=claim, daemon=True)
    thread.start()
    with connect(server.address) as looker:
        while not any(found.name == name and found.parked for found in looker.stats().sessions):
            thread.join(0.02)
            assert thread.is_alive()
    try:
        yield
    finally:
        client.close()
        thread.join()


@contextlib.contextmanager
def putting(client: DataPlaneClient, partition: str = "train") -> Iterator[None]:
    """Meanwhile `client` puts 4 MiB of an image, wherever there is space for it. It is there when this ends."""
    image = [torch.zeros(4 << 20, dtype=torch.uint8)]
    thread = threading.Thread(target=client.put_samples, args=(["big"], partition, {"image": image}), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert client.list_samples(partition).sample_ids == ["big"]
