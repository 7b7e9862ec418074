"""What Prometheus reads of real services and storage units."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from dataplane import ClaimTimeoutError, DataPlaneConfig, Server, Shared, connect, serve
from dataplane.config import MIB
from dataplane.controller.controller import Controller
from dataplane.controller.metrics import collector as service_module
from dataplane.core.metrics import (
    BULK,
    CATALOGUE,
    JOURNAL,
    PARTITIONS,
    SERVICE,
    TASKS,
    UNITS,
    Family,
)
from dataplane.errors import ServiceUnavailableError
from dataplane.storage.unit import StorageUnit
from tests.controller.service import ScriptedLedger
from tests.documents import ROOT
from tests.metrics_read import Scrape, scrape
from tests.restarts import wait_until
from tests.web_client import WAIT_S, ask

pytestmark = pytest.mark.integration

CONFIG = {"capacity_bytes": 8 * MIB, "http_port": 0}


@pytest.fixture
def server() -> Iterator[Server]:
    with serve(CONFIG) as server:
        yield server


def families(found: Scrape) -> dict[str, Family]:
    """What is exported of the project's own, as the catalogue has it."""
    return {
        name: Family(name, family.type, family.documentation)
        for name, family in found.kinds.items()
        if name.startswith("tq_")
    }


def catalogued(*parts: list[Family]) -> dict[str, Family]:
    return {family.name: Family(family.name, family.kind, family.text) for part in parts for family in part}


def test_a_service_exports_what_is_in_the_catalogue(server: Server) -> None:
    assert families(scrape(server.http_address)) == catalogued(SERVICE, UNITS, PARTITIONS, TASKS)


def test_a_service_that_keeps_its_state_tells_of_its_journal(tmp_path: Path) -> None:
    with serve({**CONFIG, "state_dir": str(tmp_path), "units": 0}) as server:
        with connect(server.address) as client:
            client.register_partition("train", ["x"], None, [])
        found = scrape(server.http_address)
    assert families(found) == catalogued(SERVICE, JOURNAL, UNITS, PARTITIONS, TASKS)
    assert found.labels("tq_service_info", "durable") == {"true"}
    assert (found.value("tq_journal_lag_records") or 0) > 2
    assert (found.value("tq_journal_bytes") or 0) > 1000


def test_a_ledger_that_is_not_there_is_a_scrape_that_failed() -> None:
    ledger = ScriptedLedger(lambda call: ServiceUnavailableError(address="here", why="it is a test"))
    with Controller(DataPlaneConfig(http_port=0), ledger=ledger) as controller:
        answer = ask(controller.http_address, "/metrics")
        assert (answer.status, answer.json["error"]) == (503, "ServiceUnavailableError")


def test_names_are_prometheus_style() -> None:
    assert len({family.name for family in CATALOGUE}) == len(CATALOGUE)
    for family in CATALOGUE:
        assert family.name.endswith("_total") == (family.kind == "counter"), family
        assert family.text.endswith("."), family
        assert not any(part in family.name for part in ("_ms", "_mb", "_percent", "_count")), family


def test_every_catalogued_label_is_a_label(server: Server) -> None:
    with connect(server.address) as client:
        client.register_partition("train", ["x"], 4, ["t"], budget_bytes=MIB)
        client.put_samples(["a"], "train", {"x": torch.zeros(1)})
        client.get_data(client.claim_meta("train", "t", ["x"], 1))
        found = scrape(server.http_address)
    absent = {"tq_task_staleness_versions", "tq_partition_version"}
    for family in [*SERVICE, *UNITS, *PARTITIONS, *TASKS]:
        labels = {
            tuple(sorted(set(dict(found_labels)) - {"le"}))
            for name, found_labels in found.samples
            if name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") == family.name
        }
        assert labels == (set() if family.name in absent else {tuple(sorted(family.labels))}), family


def test_openmetrics_is_spoken_to_who_asks_for_it(server: Server) -> None:
    answer = ask(server.http_address, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert "tq_put_samples" in {family.name for family in openmetrics(answer.text)}


def test_two_services_in_one_process_count_each_its_own() -> None:
    with serve(CONFIG) as first, serve(CONFIG) as second:
        with connect(first.address) as client:
            client.register_partition("only-first", ["x"], None, [])
            client.put_samples(["a"], "only-first", {"x": torch.zeros(1)})
        one, other = scrape(first.http_address), scrape(second.http_address)
    assert (one.value("tq_put_samples_total"), other.value("tq_put_samples_total")) == (1, 0)
    assert (one.value("tq_partitions"), other.value("tq_partitions")) == (1, 0)
    assert one.labels("tq_service_info", "epoch") != other.labels("tq_service_info", "epoch")


def test_samples_and_bytes_are_counted_once(server: Server) -> None:
    rows = [torch.arange(n) for n in (3, 1)]
    with connect(server.address) as client:
        client.register_partition("p", ["ids", "what", "image", "reward"], None, [])
        client.put_samples(["a", "b"], "p", {"ids": rows})
        client.put_samples(["a", "b"], "p", {"reward": torch.zeros(2)})
        client.put_samples(["a", "b"], "p", {"image": Shared([torch.zeros(100)], [0, 0])})
        found = scrape(server.http_address)
        first = 4 * 8 + 2 * 4 + 400
        assert found.value("tq_put_bytes_total") == first
        assert found.value("tq_overwritten_bytes_total") == 0
        assert (found.value("tq_put_samples_total"), found.value("tq_new_samples_total")) == (6, 2)

        client.put_samples(["b", "c"], "p", {"ids": rows})
        found = scrape(server.http_address)
        assert found.value("tq_put_bytes_total") == first + 32
        assert found.value("tq_overwritten_bytes_total") == 3 * 8
        assert (found.value("tq_put_samples_total"), found.value("tq_new_samples_total")) == (8, 3)

        client.put_samples(["a", "c"], "p", {"image": Shared([torch.zeros(50)], [0, 0])})
        found = scrape(server.http_address)
        assert found.value("tq_overwritten_bytes_total") == 3 * 8, "the bytes are new to c"
        client.put_samples(["a", "b"], "p", {"image": Shared([torch.zeros(50)], [0, 0])})
        found = scrape(server.http_address)
        assert found.value("tq_overwritten_bytes_total") == 3 * 8 + 200

        before = found.value("tq_put_bytes_total")
        client.put_samples(["a"], "p", {"what": [{"answer": "x" * 1000}]})
        found = scrape(server.http_address)
        assert (found.value("tq_put_bytes_total") or 0) - (before or 0) > 1000, "objects count"
        for name in ("put_bytes", "overwritten_bytes", "put_samples", "new_samples", "got_bytes"):
            assert found.value(f"tq_partition_{name}_total", partition="p") == found.value(f"tq_{name}_total")


def test_appending_and_reading_count_what_moved(server: Server) -> None:
    with connect(server.address) as client:
        client.register_partition("p", ["ids"], None, [])
        client.put_samples(["a"], "p", {"ids": [torch.arange(3)]})
        client.put_samples(["a", "new"], "p", {"ids": [torch.arange(2), torch.arange(1)]}, mode="append")
        found = scrape(server.http_address)
        assert found.value("tq_put_bytes_total") == (3 + 5 + 1) * 8
        assert found.value("tq_overwritten_bytes_total") == 5 * 8
        assert found.value("tq_got_bytes_total") == 3 * 8, "an append reads what it appends to"
        client.get_samples(["a", "new"], "p", ["ids"])
        assert scrape(server.http_address).value("tq_got_bytes_total") == (3 + 5 + 1) * 8


def test_tasks_are_shown_as_they_stand(server: Server) -> None:
    with connect(server.address) as client:
        client.register_partition("p", ["x"], 8, ["t", "idle"])
        client.set_version("p", 7)
        tags = [{"weight_version": 4 + n} for n in range(3)]
        client.put_samples(["a", "b", "c"], "p", {"x": torch.zeros(3)}, tags=tags)
        client.claim_meta("p", "t", ["x"], 1, lease_s=600)
        thread = threading.Thread(
            target=client.claim_meta, args=("p", "t", ["x"], 3), kwargs={"timeout_s": WAIT_S, "min_batch_size": 3}
        )
        thread.start()

        def waiting() -> Scrape | None:
            found = scrape(server.http_address)
            return found if found.value("tq_task_waiting_claims", partition="p", task="t") else None

        found = wait_until(waiting)
        of_t = {"partition": "p", "task": "t"}
        assert found.value("tq_task_ready_samples", **of_t) == 2
        assert found.value("tq_task_leased_samples", **of_t) == 1
        assert found.value("tq_task_claimed_samples", **of_t) == 1
        assert found.value("tq_task_staleness_versions", **of_t) == 2
        assert found.value("tq_task_claims_total", **of_t) == 1
        assert found.value("tq_partition_waiting_claims", partition="p") == 1
        # The ledger's clock may be 5 ms older than the one by which claims are measured once they are answered.
        wait_until(lambda: (scrape(server.http_address).value("tq_task_oldest_wait_seconds", **of_t) or 0) > 0.06)
        client.put_samples(["d"], "p", {"x": torch.zeros(1)})
        thread.join(WAIT_S)
        found = scrape(server.http_address)
        assert found.value("tq_task_claims_total", **of_t) == 2
        assert (found.value("tq_task_claim_wait_seconds_total", **of_t) or 0) > 0.05
        assert found.value("tq_task_oldest_wait_seconds", **of_t) == 0
        assert found.value("tq_task_claims_total", partition="p", task="idle") == 0


def test_calls_are_counted_by_what_came_of_them(server: Server) -> None:
    with connect(server.address) as client:
        client.register_partition("p", ["x"], 8, ["t"])
        with pytest.raises(ClaimTimeoutError):
            client.claim_meta("p", "t", ["x"], 1, timeout_s=0.05)
        with pytest.raises(KeyError):
            client.claim_meta("p", "none", ["x"], 1)
        found = scrape(server.http_address)
    assert found.value("tq_calls_total", op="claim", outcome="ok") == 0
    assert found.value("tq_calls_total", op="claim", outcome="ClaimTimeoutError") == 1
    assert found.value("tq_calls_total", op="claim", outcome="TaskNotFoundError") == 1
    assert found.value("tq_calls_total", op="register", outcome="ok") == 1
    assert found.value("tq_call_seconds_count", op="claim") == 2
    assert (found.value("tq_call_seconds_sum", op="claim") or 0) > 0
    assert found.value("tq_call_seconds_bucket", op="claim", le="+Inf") == 2
    assert (found.value("tq_ledger_busy_seconds_total") or 0) > 0


def test_partitions_that_are_gone_disappear(server: Server) -> None:
    with connect(server.address) as client:
        for name in ("stays", "goes"):
            client.register_partition(name, ["x"], None, ["t"])
            client.put_samples(["a"], name, {"x": torch.zeros(1)})
            client.claim_meta(name, "t", ["x"], 1)
        assert scrape(server.http_address).labels("tq_partition_live_samples", "partition") == {"stays", "goes"}
        client.clear_samples(None, "goes")
        found = scrape(server.http_address)
        for name in ("tq_partition_put_samples_total", "tq_task_claims_total", "tq_partition_live_samples"):
            assert found.labels(name, "partition") == {"stays"}
        assert found.value("tq_put_samples_total") == 2
        client.register_partition("goes", ["x"], None, ["t"])
        found = scrape(server.http_address)
        assert found.value("tq_partition_put_samples_total", partition="goes") == 0, "it is another one"


def test_partitions_and_tasks_that_are_too_many_are_counted_only(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "PARTITIONS_SHOWN", 2)
    monkeypatch.setattr(service_module, "TASKS_SHOWN", 1)
    with connect(server.address) as client:
        for name in ("first", "second", "third"):
            client.register_partition(name, ["x"], None, ["t", "u"])
        found = scrape(server.http_address)
    assert found.labels("tq_partition_live_samples", "partition") == {"second", "third"}
    assert found.labels("tq_task_ready_samples", "task") == {"t"}
    assert (found.value("tq_partitions"), found.value("tq_partitions_not_shown")) == (3, 1)


def test_names_of_partitions_may_be_anything(server: Server) -> None:
    name = 'a "b"\\c\nd ä'
    with connect(server.address) as client:
        client.register_partition(name, ["x"], None, [])
        assert scrape(server.http_address).labels("tq_partition_live_samples", "partition") == {name}


def test_memory_and_pins(server: Server) -> None:
    with connect(server.address) as client:
        client.register_partition("p", ["x"], None, [], budget_bytes=2 * MIB)
        client.put_samples(["a"], "p", {"x": torch.zeros(1, 1 << 18)})
        view = client.get_samples(["a"], "p", ["x"], copy=False)
        found = scrape(server.http_address)
        unit = {"unit": "1", "name": "unit-0"}
        assert found.value("tq_unit_live_bytes", **unit) == MIB
        assert found.value("tq_unit_pinned_bytes", **unit) == MIB
        assert found.value("tq_unit_capacity_bytes", **unit) == 8 * MIB
        assert found.value("tq_unit_backed_bytes", **unit) == 8 * MIB
        assert found.value("tq_unit_free_bytes", **unit) == 7 * MIB
        assert found.value("tq_unit_fragmentation_ratio", **unit) == 0
        assert found.value("tq_partition_budget_bytes", partition="p") == 2 * MIB
        assert found.value("tq_pins") == 1
        assert found.value("tq_sessions", state="live") == 1
        del view


# --- storage units


def test_a_unit_exports_what_is_in_the_catalogue_and_serves_nothing_else(server: Server) -> None:
    with StorageUnit(DataPlaneConfig(**CONFIG), server.address, name="more") as unit:
        address = unit.http_url.removeprefix("http://")
        found = scrape(address)
        assert families(found) == catalogued(BULK)
        assert found.value("tq_bulk_info", unit="2", name="more") == 1
        assert found.value("tq_bulk_arena_capacity_bytes") == 8 * MIB
        assert ask(address, "/healthz").text == "ok\n"
        assert ask(address, "/").status == 404
        assert ask(address, "/api/stats").status == 404
    with pytest.raises(ConnectionRefusedError):
        ask(address, "/metrics")


def test_a_unit_wants_the_token_too() -> None:
    guarded = {**CONFIG, "token": "secret"}
    with (
        serve({**guarded, "units": 0}) as server,
        StorageUnit(DataPlaneConfig(**guarded), server.address) as unit,
    ):
        address = unit.http_url.removeprefix("http://")
        assert ask(address, "/metrics").status == 401
        assert ask(address, "/healthz").status == 200
        assert scrape(address, Authorization="Bearer secret").value("tq_bulk_read_bytes_total") == 0


def counted_read(address: str) -> Scrape | None:
    found = scrape(address)
    return found if found.value("tq_bulk_request_seconds_count", verb="read") else None


def test_a_unit_counts_what_goes_to_other_hosts_and_whom_it_refuses() -> None:
    with (
        serve({**CONFIG, "units": 0}) as server,
        StorageUnit(DataPlaneConfig(**CONFIG), server.address) as unit,
    ):
        address = unit.http_url.removeprefix("http://")
        with connect(server.address, force_remote=True) as client:
            client.register_partition("p", ["x"], None, [])
            client.put_samples(["a"], "p", {"x": torch.zeros(1, 1000)})
            client.get_samples(["a"], "p", ["x"])
            found = wait_until(lambda: counted_read(address), "the read, which is counted once its answer is sent")
            assert found.value("tq_bulk_written_bytes_total") == 4000
            assert found.value("tq_bulk_read_bytes_total") == 4000
            assert found.value("tq_bulk_requests_total", verb="write", outcome="ok") == 1
            assert found.value("tq_bulk_request_seconds_count", verb="read") == 1
            assert found.value("tq_bulk_attached_sessions") == 0
        with connect(server.address) as client:
            client.get_samples(["a"], "p", ["x"])
            assert scrape(address).value("tq_bulk_attached_sessions") == 1


# --- the manual


def test_the_manual_has_exactly_what_is_exported() -> None:
    manual = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(tq_\w+)` \| (\w+) \| (.*?) \| (.+) \|$", manual, re.M)
    told = [Family(name, kind, text, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, text in rows]
    assert told == CATALOGUE
