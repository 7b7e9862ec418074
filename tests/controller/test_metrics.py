"""What Prometheus reads of real services and storage units."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from dataplane import ClaimTimeoutError, DataPlaneConfig, Server, Shared, connect, serve
from dataplane.config import MIB
from dataplane.controller.controller import Controller
from dataplane.controller.metrics import collector as service_module
from dataplane.controller.metrics import history as history_module
from dataplane.controller.metrics import recorder as recorder_module
from dataplane.controller.metrics.collector import ServiceMetrics
from dataplane.controller.metrics.history import KEPT_S, Throughput, Timeline
from dataplane.controller.metrics.recorder import Recorder
from dataplane.core.metrics import (
    BOUNDS_S,
    BULK,
    CATALOGUE,
    JOURNAL,
    PARTITIONS,
    SERVICE,
    TASKS,
    UNITS,
    Family,
    Op,
    Sheet,
)
from dataplane.core.types import PROTOCOL_VERSION, FieldKind, FieldSpec
from dataplane.errors import DataPlaneError, InvalidRequestError, SampleNotFoundError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.storage.unit import StorageUnit
from tests.controller.service import ScriptedLedger
from tests.documents import ROOT
from tests.metrics_read import Scrape, scrape
from tests.restarts import wait_until
from tests.web_client import WAIT_S, ask

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


@pytest.mark.integration
def test_a_service_exports_what_is_in_the_catalogue(server: Server) -> None:
    assert families(scrape(server.http_address)) == catalogued(SERVICE, UNITS, PARTITIONS, TASKS)


@pytest.mark.integration
def test_a_service_that_keeps_its_state_tells_of_its_journal(tmp_path: Path) -> None:
    with serve({**CONFIG, "state_dir": str(tmp_path), "units": 0}) as server:
        with connect(server.address) as client:
            client.register_partition("train", ["x"], None, [])
        found = scrape(server.http_address)
    assert families(found) == catalogued(SERVICE, JOURNAL, UNITS, PARTITIONS, TASKS)
    assert found.labels("tq_service_info", "durable") == {"true"}
    assert (found.value("tq_journal_lag_records") or 0) > 2
    assert (found.value("tq_journal_bytes") or 0) > 1000


@pytest.mark.integration
def test_a_ledger_that_is_not_there_is_a_scrape_that_failed() -> None:
    ledger = ScriptedLedger(lambda call: ServiceUnavailableError(address="here", why="it is a test"))
    with Controller(DataPlaneConfig(http_port=0), ledger=ledger) as controller:
        answer = ask(controller.http_address, "/metrics")
        assert (answer.status, answer.json["error"]) == (503, "ServiceUnavailableError")


@pytest.mark.integration
def test_names_are_prometheus_style() -> None:
    assert len({family.name for family in CATALOGUE}) == len(CATALOGUE)
    for family in CATALOGUE:
        assert family.name.endswith("_total") == (family.kind == "counter"), family
        assert family.text.endswith("."), family
        assert not any(part in family.name for part in ("_ms", "_mb", "_percent", "_count")), family


@pytest.mark.integration
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


@pytest.mark.integration
def test_openmetrics_is_spoken_to_who_asks_for_it(server: Server) -> None:
    answer = ask(server.http_address, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert "tq_put_samples" in {family.name for family in openmetrics(answer.text)}


@pytest.mark.integration
def test_two_services_in_one_process_count_each_its_own() -> None:
    with serve(CONFIG) as first, serve(CONFIG) as second:
        with connect(first.address) as client:
            client.register_partition("only-first", ["x"], None, [])
            client.put_samples(["a"], "only-first", {"x": torch.zeros(1)})
        one, other = scrape(first.http_address), scrape(second.http_address)
    assert (one.value("tq_put_samples_total"), other.value("tq_put_samples_total")) == (1, 0)
    assert (one.value("tq_partitions"), other.value("tq_partitions")) == (1, 0)
    assert one.labels("tq_service_info", "epoch") != other.labels("tq_service_info", "epoch")


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
def test_names_of_partitions_may_be_anything(server: Server) -> None:
    name = 'a "b"\\c\nd ä'
    with connect(server.address) as client:
        client.register_partition(name, ["x"], None, [])
        assert scrape(server.http_address).labels("tq_partition_live_samples", "partition") == {name}


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
def test_the_manual_has_exactly_what_is_exported() -> None:
    manual = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(tq_\w+)` \| (\w+) \| (.*?) \| (.+) \|$", manual, re.M)
    told = [Family(name, kind, text, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, text in rows]
    assert told == CATALOGUE


# --- What is counted of each answer, and that it stays bounded.


INT64 = FieldSpec(kind=FieldKind.JAGGED, dtype="int64", inner=())


class Told:
    """A recorder, a clock that a test sets, and answers to calls."""

    def __init__(self) -> None:
        self.now = 100.0
        self.unix_s = 1_700_000_000.25
        self.recorder = Recorder(lambda: self.now, wall=lambda: self.now + self.unix_s)
        self.call_id = 0

    def call(
        self, command: c.Command, result: c.Result | DataPlaneError, *, took: float = 0.5, session: int = 7
    ) -> int:
        """The call comes now, and is answered `took` seconds later."""
        self.call_id += 1
        began = self.now
        self.now += took
        call = c.Call(session=session, call_id=self.call_id, watermark=self.call_id, command=command)
        self.recorder.answered(call, c.Answer(session=session, call_id=self.call_id, result=result), began)
        return self.call_id

    def put(self, count: int, *, allocated: bool = True, **more: Any) -> None:
        rows = np.arange(count)
        space = self.call(c.Allocate(partition="p", columns=()), c.Allocated(placements=())) if allocated else 99
        commit = c.Commit(
            partition="p",
            samples=c.Samples(ids=tuple(map(str, rows))),
            mode=c.Mode.UPSERT,
            reservation=space,
            offset=None if allocated else 0,
            columns=(c.CommitColumn(name="x", spec=INT64, lengths=np.full(count, 3)),),
        )
        self.call(commit, c.Committed(rows=rows, generations=rows, **more))

    def spans(self) -> list[tuple[str, str, int, int, float, float]]:
        """What, name, samples, bytes, start and end by this clock."""
        return [
            (s.what, s.name, s.samples, s.bytes, round(s.start - self.unix_s, 6), round(s.end - self.unix_s, 6))
            for s in self.recorder.timeline().spans
        ]


@pytest.fixture
def told() -> Told:
    return Told()


def located(count: int) -> c.Located:
    rows, places = np.arange(count), np.zeros(count, np.int64)
    found = c.FieldLocations(name="x", spec=INT64, units=places.astype(np.int32), offsets=places, lengths=places + 3)
    return c.Located(fields=(found,), rows=rows, generations=rows)


def test_a_put_begins_with_asking_for_space(told: Told) -> None:
    told.put(2, born=2)
    told.put(2, allocated=False)
    assert told.spans() == [("put", "x", 2, 48, 100.0, 101.0), ("put", "x", 2, 48, 101.0, 101.5)]
    moved = told.recorder.moved
    assert (moved["put_samples"], moved["new_samples"], moved["put_bytes"]) == (4, 2, 96)


def test_a_brief_read_is_shown_while_its_rows_are_located(told: Told) -> None:
    """Its end is not told."""
    told.call(c.Locate(partition="p", samples=c.Samples(ids=("a",)), fields=("x",), brief=True), located(1))
    assert told.spans() == [("get", "x", 1, 24, 100.0, 100.5)]
    assert told.recorder.moved["got_bytes"] == 24


def test_a_read_of_views_ends_with_its_release(told: Told) -> None:
    read = c.Locate(partition="p", samples=c.Samples(ids=("a",)), fields=("x",))
    call_id = told.call(read, located(1))
    assert told.spans() == []
    told.now = 110.0
    told.call(c.Release(located=call_id), c.Done(), took=0.0)
    assert told.spans() == [("get", "x", 1, 24, 100.0, 110.0)]
    assert told.recorder.moved["got_bytes"] == 24


def test_a_claim_that_only_looks_is_none(told: Told) -> None:
    rows = np.arange(2)
    claim = c.Claim(partition="p", task="t", fields=("x",), batch_size=2, blocking=False, peek=True)
    told.call(claim, c.Claimed(ids=("a", "b"), rows=rows, generations=rows, fields=("x",), tags=()))
    assert told.recorder.moved["claimed_samples"] == 0
    assert told.spans() == []
    assert told.recorder.ops[c.Claim].outcomes["ok"] == 1


def test_what_is_missing_has_no_bytes(told: Told) -> None:
    read = c.Locate(partition="p", samples=c.Samples(ids=("a", "b")), fields=("x",), missing_ok=True)
    found = located(2)
    found.fields[0].lengths[1] = -1
    told.call(read, found)
    assert told.recorder.moved["got_bytes"] == 24


def test_a_call_that_failed_moved_nothing(told: Told) -> None:
    read = c.Locate(partition="p", samples=c.Samples(ids=("a",)), fields=("x",))
    told.call(read, SampleNotFoundError(partition="p", samples=["a"], total=1))
    told.recorder.count()
    assert told.recorder.ops[c.Locate].outcomes == {"ok": 0, "SampleNotFoundError": 1}
    assert told.recorder.moved["got_samples"] == 0
    assert told.recorder.by_partition == {}


def test_a_session_that_is_refused_is_counted_by_its_error(told: Told) -> None:
    opened = c.OpenSession(nonce="n", host="h", name="x", protocol_version=PROTOCOL_VERSION)
    error = InvalidRequestError("no")
    told.recorder.answered(opened, c.Opened(nonce="n", error=error), told.now)
    told.recorder.count()
    assert told.recorder.ops[c.OpenSession].outcomes == {"ok": 0, "InvalidRequestError": 1}
    assert told.recorder._timeline.clients == {}


def test_waiting_is_summed_for_each_task(told: Told) -> None:
    claim = c.Claim(partition="p", task="t", fields=("x",), batch_size=1)
    nothing = np.zeros(0, np.int64)
    told.call(claim, c.Claimed(ids=(), rows=nothing, generations=nothing, fields=(), tags=()), took=2.0)
    error = ClaimTimeoutError(partition="p", task="t", wanted=1, ready=0, waited_s=5.0, why="nothing came")
    told.call(claim, error, took=5.0)
    told.recorder.count()
    waited = told.recorder.by_task["p", "t"]
    assert (waited.outcomes, waited.sum_s) == ({"ok": 1}, 2.0)
    assert told.recorder.ops[c.Claim].sum_s == 7.0


def test_what_is_told_is_counted_together_and_before_anybody_reads(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "TOGETHER", 3)
    for _ in range(2):
        told.call(c.Stats(), c.Done())
    assert c.Stats not in told.recorder.ops
    told.call(c.Stats(), c.Done())
    assert told.recorder.ops[c.Stats].outcomes["ok"] == 3
    told.call(c.Stats(), c.Done())
    told.recorder.flow()
    assert told.recorder.ops[c.Stats].outcomes["ok"] == 4


def test_answers_of_many_samples_are_not_kept(told: Told) -> None:
    told.put(recorder_module.HEAVY)
    assert not told.recorder._pending


def test_one_that_cannot_be_counted_is_logged_and_the_rest_is(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    broken: Any = c.Committed(rows=None, generations=None)  # type: ignore[arg-type]
    commit = c.Commit(partition="p", samples=c.Samples(ids=("a",)), mode=c.Mode.UPSERT)
    told.recorder._pending.append(
        (c.Call(session=1, call_id=1, watermark=1, command=commit), c.Answer(session=1, call_id=1, result=broken), 0, 0)
    )
    told.put(1)
    with caplog.at_level(logging.ERROR):
        told.recorder.count()
    assert caplog.text.count("Could not count the answer to") == 1
    assert told.recorder.moved["put_samples"] == 1


def test_partitions_that_are_gone_stay_in_the_sum(told: Told) -> None:
    told.put(2)
    told.call(c.Clear(partition="p", samples=None), c.Cleared(count=2))
    told.recorder.count()
    assert told.recorder.by_partition == {}
    assert (told.recorder.moved["put_samples"], told.recorder.moved["cleared_samples"]) == (2, 2)


def test_a_partition_that_goes_while_all_are_summed_up_is_in_the_sum_once(told: Told) -> None:
    """Else the sum shrinks afterwards, which Prometheus takes for a start from 0."""
    told.put(2, born=2)
    told.recorder.count()
    going = threading.Thread(target=told.recorder.forget, args=(["p"],))

    class Going(Counter[str]):
        def items(self) -> Any:  # read by the sum
            if going.ident is None:
                going.start()
                going.join(0.2)  # it has to wait
            return super().items()

    told.recorder.by_partition["p"] = Going(told.recorder.by_partition["p"])
    assert told.recorder.moved["put_samples"] == 2
    going.join()
    assert told.recorder.by_partition == {}
    assert told.recorder.moved["put_samples"] == 2


def test_a_partition_that_comes_while_prometheus_asks_is_not_taken_for_one_that_is_gone(told: Told) -> None:
    def ask(command: c.Command) -> c.Result:
        if isinstance(command, c.Waits):
            return c.WaitList(now=0.0, waits=(), total=0)
        told.put(2, born=2)  # too late for this answer
        return c.StatsReport(
            epoch=1,
            now=0.0,
            units=(),
            partitions=(),
            sessions=(),
            waiting_allocations=0,
            low_watermark=0.5,
            high_watermark=0.9,
        )

    metrics = ServiceMetrics(ask, told.recorder)
    list(metrics.collect())
    assert told.recorder.by_partition["p"]["put_samples"] == 2


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (history_module, recorder_module):
        monkeypatch.setattr(module, "OPEN", 10)
    told = Told()
    for number in range(50):
        told.call(c.Allocate(partition="p", columns=()), c.Allocated(placements=()))
        told.call(c.Locate(partition=f"p{number}", samples=c.Samples(ids=("a",)), fields=("x",)), located(1))
        opened = c.OpenSession(nonce=str(number), host="h", name=f"n{number}", protocol_version=PROTOCOL_VERSION)
        told.recorder.answered(opened, c.Opened(nonce=str(number), session=number), told.now)
    told.recorder.count()
    sizes = [told.recorder._reserved, told.recorder._reading, told.recorder.by_partition]
    assert [len(kept) for kept in sizes] == [10, 10, 10]
    assert len(told.recorder._timeline.clients) == 10
    assert told.recorder.moved["got_samples"] == 50


@pytest.mark.parametrize("by_s", [86_400, -86_400])
def test_times_are_by_the_clock_that_people_have_now(told: Told, by_s: int) -> None:
    told.put(3)
    told.now += 10
    (before,), flow = told.recorder.timeline().spans, told.recorder.flow()
    told.unix_s += by_s
    (after,), shifted = told.recorder.timeline().spans, told.recorder.flow()
    assert (after.start, after.end) == (before.start + by_s, before.end + by_s)
    assert shifted.times == [second + by_s for second in flow.times]
    assert shifted.puts == flow.puts
    assert sum(flow.puts) == 3


def test_the_timeline_has_the_last_ones(told: Told) -> None:
    for number in range(history_module.KEPT + 5):
        told.call(c.SetVersion(partition="p", version=number), c.Done(), took=0.001)
    spans = told.spans()
    assert len(spans) == history_module.KEPT
    assert spans[0][:2] == ("version", "version 5")


def test_a_span_names_its_client_and_a_few_fields() -> None:
    timeline = Timeline()
    timeline.opened(1, "rollout-0")
    timeline.add((1, "put", "p", [f"f{n}" for n in range(9)], 1, 8, 1.0, 2.0))
    timeline.add((2, "put", "p", ["a"], 1, 8, 1.0, 2.0))
    named, unknown = timeline.report(1000.0).spans
    assert (named.client, named.name, named.start) == ("rollout-0", "f0, f1, f2, f3, f4, f5 and 3 more", 1001.0)
    assert unknown.client == "session 2"


def test_the_flow_has_every_second_also_those_in_which_nothing_happened() -> None:
    flow = Throughput()
    flow.second_at(1000.2).puts += 3
    flow.second_at(1000.9).puts += 1
    flow.second_at(1000.95).live_bytes = 64
    flow.second_at(1003.0).gets += 2
    report = flow.report(1005.5)
    assert (len(report.times), report.times[-1], report.step_s) == (KEPT_S, 1005, 1)
    assert dict(zip(report.times[-5:], report.puts[-5:], strict=True)) == {1001: 4, 1002: 0, 1003: 0, 1004: 0, 1005: 0}
    assert report.gets[-5:] == [0, 0, 0, 2, 0]
    assert report.live_bytes[-6:] == [0, 64, 64, 64, 64, 64]


def test_the_second_under_way_is_not_in_it() -> None:
    flow = Throughput()
    flow.second_at(1000.2).puts += 3
    assert sum(flow.report(1000.9).puts) == 0
    assert sum(flow.report(1001.0).puts) == 3


def test_a_clock_that_is_set_back_adds_to_the_latest_second() -> None:
    flow = Throughput()
    flow.second_at(1000.2).puts += 1
    flow.second_at(900.0).puts += 1
    assert flow.report(1001.0).puts[-1] == 2


def test_old_seconds_go(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Throughput()
    flow.second_at(5.0).live_bytes = 32
    for second in range(10, 10 + 3 * KEPT_S):
        flow.second_at(float(second)).puts += 1
    assert len(flow._seconds) == KEPT_S
    report = flow.report(10.0 + 3 * KEPT_S)
    assert report.puts == [1] * KEPT_S
    assert report.live_bytes == [32] * KEPT_S
    assert history_module.KEPT_S == 900


@pytest.mark.parametrize(("took", "bucket"), [(0.0, 0), (0.0001, 0), (0.00011, 1), (60.0, 15), (61.0, 16)])
def test_a_bucket_has_what_is_not_above_its_end(took: float, bucket: int) -> None:
    op = Op()
    op.add(took)
    assert op.buckets.index(1) == bucket
    sheet = Sheet(SERVICE)
    sheet.set_ops("calls_total", "call_seconds", {"claim": op})
    (family,) = [family for family in sheet.families() if family.name == "tq_call_seconds"]
    found = {s.labels["le"]: s.value for s in family.samples if "le" in s.labels}
    assert found == {**{str(bound): float(took <= bound) for bound in BOUNDS_S}, "+Inf": 1.0}
    assert [sample.value for sample in family.samples if "le" not in sample.labels] == [1.0, took]
