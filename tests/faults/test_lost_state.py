"""A controller comes back without its state: every old session is told so, and what was lost, whatever it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, KVBatchMeta, ServiceRestartedError, ServiceUnavailableError, connect
from dataplane.storage.arena_record import discard
from tests.faults.acting import Order
from tests.faults.cast import Player
from tests.faults.houses import HERE, serve_unit
from tests.restarts import RestartableService, wait_until

pytestmark = pytest.mark.integration

Call = Callable[[DataPlaneClient, KVBatchMeta, Path], Any]
VERBS: dict[str, Call] = {
    "register_partition": lambda client, meta, path: client.register_partition("p", ["x"], None, ["train"]),
    "put_samples": lambda client, meta, path: client.put_samples(["s9"], "p", {"x": torch.arange(1)}),
    "write back": lambda client, meta, path: client.put_samples(meta, "p", {"x": torch.arange(1)}),
    "get_samples": lambda client, meta, path: client.get_samples(["s1"], "p", ["x"]),
    "views": lambda client, meta, path: client.get_samples(["s1"], "p", ["x"], copy=False),
    "get_data": lambda client, meta, path: client.get_data(meta, ["x"]),
    "get_batch": lambda client, meta, path: client.get_batch(meta, ["x"]),
    "claim_meta": lambda client, meta, path: client.claim_meta("p", "train", ["x"], 1),
    "ack": lambda client, meta, path: client.ack(meta),
    "nack": lambda client, meta, path: client.nack(meta),
    "extend": lambda client, meta, path: client.extend(meta, 60.0),
    "check_consumption_status": lambda client, meta, path: client.check_consumption_status("p", ["train"]),
    "why_blocked": lambda client, meta, path: client.why_blocked("p", "train"),
    "clear_samples": lambda client, meta, path: client.clear_samples(meta, "p"),
    "clear all": lambda client, meta, path: client.clear_samples(None, "p"),
    "seal": lambda client, meta, path: client.seal("p"),
    "list_samples": lambda client, meta, path: client.list_samples("p"),
    "set_tags": lambda client, meta, path: client.set_tags(["s1"], "p", [{"a": 1}]),
    "set_version": lambda client, meta, path: client.set_version("p", 1),
    "checkpoint": lambda client, meta, path: client.checkpoint(path / "new"),
    "restore": lambda client, meta, path: client.restore(path / "old", replace=True),
    "stats": lambda client, meta, path: client.stats(),
    "locate": lambda client, meta, path: client.locate(meta, ["x"]),
    "matrix": lambda client, meta, path: client.matrix("p"),
    "show_sample": lambda client, meta, path: client.show_sample("s1"),
    "memory_map": lambda client, meta, path: client.memory_map(1),
    "waits": lambda client, meta, path: client.waits(),
    "drain": lambda client, meta, path: client.drain(1),
    "undrain": lambda client, meta, path: client.undrain(1),
    "drop_unit": lambda client, meta, path: client.drop_unit(1),
}
Asker = Callable[[str], None]


def _knows(client: DataPlaneClient) -> bool:
    """Whether it knows that the service began anew. Without a state directory its calls fail until then."""
    try:
        client.stats()
    except ServiceRestartedError:
        return True
    except ServiceUnavailableError:
        pass
    return False


@pytest.fixture(scope="module", params=[True, False], ids=["with a state directory", "without"])
def ask(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    """Has a client of the service's last run, one for each verb, ask this one."""
    path = tmp_path_factory.mktemp("lost")
    restartable = RestartableService(path / "state")
    restartable.start(durable=request.param)
    restartable.unit()
    clients: dict[str, tuple[DataPlaneClient, KVBatchMeta]] = {}
    for verb in VERBS:
        client = connect(restartable.address, heartbeat_s=0.1)
        if not clients:
            client.register_partition("p", ["x"], None, ["train"])
            client.put_samples([f"s{n}" for n in range(len(VERBS))], "p", {"x": torch.arange(len(VERBS))})
            client.checkpoint(path / "old")
        clients[verb] = client, client.claim_meta("p", "train", ["x"], 1, lease_s=600.0)
    restartable.stop()
    if request.param:
        restartable.forget()
    restartable.start(durable=request.param)
    if not request.param:
        wait_until(lambda: all(_knows(client) for client, _ in clients.values()), "they notice the new run")

    def ask(verb: str) -> None:
        client, meta = clients[verb]
        VERBS[verb](client, meta, path)

    yield ask
    for client, _ in clients.values():
        client.close()
    restartable.close()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_tells_that_the_service_lost_its_state(ask: Asker, verb: str) -> None:
    for _ in range(2):
        with pytest.raises(ServiceRestartedError) as caught:
            ask(verb)
        assert "every partition, sample and claim" in caught.value.lost


def test_every_verb_of_the_client_is_asked() -> None:
    public = {name for name in vars(DataPlaneClient) if not name.startswith("_")}
    assert public - {"close", "config", "connect", "on_event", "perform"} == VERBS.keys() - {
        "write back",
        "views",
        "clear all",
    }


def test_a_unit_that_dies_while_it_starts_over_leaves_nothing(tmp_path: Path) -> None:
    restartable = RestartableService(tmp_path / "lost")
    restartable.start()
    unit = Player("unit", str(tmp_path), serve_unit, restartable.address, 1, HERE, says=True)
    try:
        unit.start(Order("unit.start_over", "kill"))
        unit.ready()
        restartable.stop()
        restartable.forget()
        restartable.start()
        unit.await_death()
        unit.start()
        unit.ready()
        with connect(restartable.address) as client:
            client.register_partition("p", ["x"], None, [])
            client.put_samples(["s"], "p", {"x": torch.ones(1)})
            wait_until(lambda: [each.live_bytes for each in client.stats().units] == [64])
    finally:
        unit.kill()
        restartable.close()
        discard(tmp_path / "state", ["/dev/shm"])
