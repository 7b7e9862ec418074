"""What a service answers over HTTP, to whom, and what it shows."""

from __future__ import annotations

import base64
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import torch

from dataplane import DataPlaneClient, DataPlaneConfig, Server, connect, serve
from dataplane.config import MIB
from dataplane.controller import event_loop
from dataplane.controller.controller import Controller
from dataplane.core.addresses import split_address
from dataplane.protocol import http as server_module
from dataplane.protocol.http import HttpServer
from dataplane.storage.arena_record import discard
from tests.controller.service import NEVER_S
from tests.restarts import wait_until
from tests.secure import tls
from tests.web_client import WAIT_S, ask, context

pytestmark = pytest.mark.integration

TOKEN = "open-sesame-7f3a"
PATHS = ["/", "/metrics", "/api/stats", "/api/matrix?partition=train", "/api/memory?unit=1", "/api/waits"]
PATHS += ["/api/why?partition=train&task=policy", "/api/sample?partition=train&id=a", "/api/flow", "/api/timeline"]


def fill(client: DataPlaneClient) -> None:
    client.register_partition("train", ["ids", "reward", "logprobs"], 4, ["policy", "critic"])
    client.put_samples(
        ["a", "b", "c"],
        "train",
        {"ids": [torch.arange(n) for n in (5, 2, 9)], "reward": torch.zeros(3)},
        tags=[{"group": "g"}] * 3,
    )
    client.put_samples(["a"], "train", {"logprobs": [torch.zeros(5)]})
    client.get_data(client.claim_meta("train", "policy", ["ids"], 1, lease_s=600))


@pytest.fixture(autouse=True, scope="module")
def _busy_machine() -> Iterator[None]:
    """Neither a client nor a ledger that a busy machine delays is given up."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server_module, "READ_S", WAIT_S)
        patched.setattr(event_loop, "INSPECT_S", WAIT_S)
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = {"capacity_bytes": 8 * MIB, "http_port": 0, "heartbeat_s": 0.2}
    with serve(config) as server, connect(server.address, client_name="rollout-0") as client:
        fill(client)
        yield server


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with serve({"capacity_bytes": 8 * MIB, "http_port": 0, "token": TOKEN}) as server:
        with connect(server.address, token=TOKEN) as client:
            fill(client)
        yield server


@pytest.fixture(scope="module")
def secured() -> Iterator[Server]:
    with serve({"capacity_bytes": 8 * MIB, "http_port": 0, "token": TOKEN, **tls()}) as server:
        yield server


def json(server: Server, path: str, **parameters: object) -> Any:
    answer = ask(server.http_address, f"{path}?{urlencode(parameters)}" if parameters else path)
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json


# --- what it shows


def test_without_a_port_nobody_is_answered() -> None:
    with serve({"capacity_bytes": MIB}) as server:
        assert server.http_address == ""


def test_stats_are_those_that_clients_get(server: Server) -> None:
    with connect(server.address) as client:
        told, known = json(server, "/api/stats"), client.stats()
    assert told["epoch"] == known.epoch
    assert told["units"][0]["live_bytes"] == known.units[0].live_bytes
    assert told["partitions"][0]["produced"] == {"ids": 3, "reward": 3, "logprobs": 1}
    assert [task["task"] for task in told["partitions"][0]["tasks"]] == ["policy", "critic"]


def test_a_partition_by_age(server: Server) -> None:
    matrix = json(server, "/api/matrix", partition="train")
    assert matrix["samples"] == [1, 1, 1]
    assert matrix["produced"]["logprobs"] == [1, 0, 0]
    assert matrix["tasks"][0] == {"task": "policy", "claimed": [1, 0, 0], "leased": [1, 0, 0]}
    assert json(server, "/api/matrix", partition="train", columns=1)["samples"] == [3]


def test_an_arena_by_address(server: Server) -> None:
    memory = json(server, "/api/memory", unit=1, cells=8)
    assert len(memory["live"]) == 8
    assert memory["cell_bytes"] == MIB
    assert memory["live"][0] > 0


def test_who_waits_and_why(server: Server) -> None:
    with connect(server.address, client_name="impatient") as client:
        client.register_partition("side", ["x"], 1, ["t"])
        thread = threading.Thread(target=client.claim_meta, args=("side", "t", ["x"], 1), kwargs={"timeout_s": WAIT_S})
        thread.start()
        (wait,) = wait_until(lambda: json(server, "/api/waits")["waits"])
        assert (wait["client"], wait["what"], wait["task"], wait["fields"]) == ("impatient", "claim", "t", ["x"])
        client.put_samples(["a"], "side", {"x": torch.zeros(1)})
        thread.join(WAIT_S)
        client.clear_samples(None, "side")
    assert json(server, "/api/waits")["waits"] == []
    why = json(server, "/api/why", partition="train", task="policy")
    assert (why["unclaimed"], why["lacking"]) == (2, {"ids": 0})


def test_a_sample(server: Server) -> None:
    shown = json(server, "/api/sample", partition="train", id="b")
    assert [cell["field"] for cell in shown["cells"]] == ["ids", "reward"]
    assert (shown["missing"], shown["tags"]) == (["logprobs"], {"group": "g"})


def test_what_happened_lately(server: Server) -> None:
    def of_client() -> list[Any]:
        return [span for span in json(server, "/api/timeline")["spans"] if span["client"] == "rollout-0"]

    # Nobody waits for the end of a read to be heard of.
    mine = wait_until(lambda: len(found := of_client()) >= 4 and found, "the end of the read")
    assert [(span["what"], span["name"], span["samples"]) for span in mine[:4]] == [
        ("put", "ids, reward", 3),
        ("put", "logprobs", 1),
        ("claim", "policy", 1),
        ("get", "ids", 1),
    ]
    assert [span["bytes"] for span in mine[:4]] == [16 * 8 + 3 * 4, 5 * 4, 0, 5 * 8]
    now = time.time()
    assert all(now - 600 < span["start"] <= span["end"] <= now + 1 for span in mine)


def test_the_flow_of_the_last_quarter_of_an_hour() -> None:
    with serve({"capacity_bytes": 8 * MIB, "http_port": 0}) as server, connect(server.address) as client:
        fill(client)
        wait_until(lambda: sum(json(server, "/api/flow")["gets"]) == 1, "the end of the second in which it was read")
        wait_until(lambda: json(server, "/api/flow")["live_bytes"][-1], "a second after which something lives")
        flow = json(server, "/api/flow")
    assert (sum(flow["puts"]), sum(flow["put_bytes"])) == (4, 160)
    assert (sum(flow["claims"]), sum(flow["gets"]), sum(flow["get_bytes"])) == (1, 1, 40)
    assert len(flow["times"]) == len(flow["live_bytes"]) == 900
    assert flow["times"] == list(range(flow["times"][0], flow["times"][0] + 900))


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/api/matrix", 400, "InvalidRequestError"),
        ("/api/matrix?partition=none", 404, "PartitionNotFoundError"),
        ("/api/matrix?partition=train&columns=0", 400, "InvalidRequestError"),
        ("/api/matrix?partition=train&columns=99999", 400, "InvalidRequestError"),
        ("/api/memory?unit=99", 400, "InvalidRequestError"),
        ("/api/memory?unit=99999999999999999999", 400, "InvalidRequestError"),
        ("/api/why?partition=train&task=none", 404, "TaskNotFoundError"),
        ("/api/sample?partition=train&id=zz", 404, "SampleNotFoundError"),
        ("/api/stats?verbose=1", 400, "InvalidRequestError"),
        ("/api/nothing", 404, "NotFound"),
        ("/../config.py", 404, "NotFound"),
        ("/page/index.html", 404, "NotFound"),
    ],
)
def test_what_is_not_there_or_wrong_is_named(server: Server, path: str, status: int, error: str) -> None:
    answer = ask(server.http_address, path)
    assert (answer.status, answer.json["error"]) == (status, error)
    assert answer.json["message"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "FROB"])
def test_nothing_can_be_changed(server: Server, method: str) -> None:
    assert ask(server.http_address, "/api/stats", method).status == 501


def test_what_looks_at_a_service_leaves_no_session_and_no_record(tmp_path: Path) -> None:
    config = {"capacity_bytes": MIB, "http_port": 0, "state_dir": str(tmp_path), "heartbeat_s": NEVER_S}
    with serve({**config, "session_timeout_s": NEVER_S}) as server, connect(server.address) as client:
        client.register_partition("train", ["ids"], None, ["policy"])
        durable = server._controller._durable
        assert durable is not None
        records = durable.lag
        for path in (*PATHS[1:5], "/api/why?partition=train&task=policy"):
            assert ask(server.http_address, path).status == 200
        assert durable.lag == records
        assert len(client.stats().sessions) == 1
    discard(tmp_path, ["/dev/shm"])


def test_a_ledger_that_is_busy_for_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "INSPECT_S", 0.05)
    busy = threading.Event()
    with Controller(DataPlaneConfig(http_port=0)) as controller:
        assert controller._ledger_thread is not None
        controller._ledger_thread.run(busy.wait)
        answer = ask(controller.http_address, "/api/stats")
        busy.set()
    assert (answer.status, answer.json["error"]) == (503, "CallTimeoutError")
    assert "Stats" in answer.json["message"]


# --- health


def test_health_is_for_everybody(guarded: Server) -> None:
    answer = ask(guarded.http_address, "/healthz")
    assert (answer.status, answer.text) == (200, "ok\n")


# --- who is let in


@pytest.mark.parametrize("path", PATHS[1:])
def test_with_a_token_nothing_is_shown_without(guarded: Server, path: str) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer x"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Basic ="},
        {"Authorization": "Bearer"},
    ):
        answer = ask(guarded.http_address, path, **headers)
        assert (answer.status, answer.json["error"]) == (401, "Unauthorized")
        assert answer.headers["www-authenticate"].startswith("Basic ")
    assert ask(guarded.http_address, path, Authorization=f"Bearer {TOKEN}").status == 200


def test_what_is_there_cannot_be_told_without_the_token(guarded: Server) -> None:
    assert ask(guarded.http_address, "/api/nothing").status == 401


def test_a_browser_sends_the_token_as_password_of_any_user(guarded: Server) -> None:
    def basic(text: str) -> str:
        return "Basic " + base64.b64encode(text.encode()).decode()

    for path in PATHS:
        assert ask(guarded.http_address, path, Authorization=basic(f"me:{TOKEN}")).status == 200
        assert ask(guarded.http_address, path, Authorization=basic(f"{TOKEN}:me")).status == 401
        assert ask(guarded.http_address, path, Authorization=basic(TOKEN)).status == 401


def test_a_name_that_leads_to_loopback_is_not_answered(server: Server) -> None:
    """Else any page could read the service by having its own name resolve to this machine."""
    port = split_address(server.http_address)[1]
    for host, status in {
        f"evil.example:{port}": 421,
        "evil.example": 421,
        f"localhost:{port}": 200,
        "[::1]": 200,
    }.items():
        assert ask(server.http_address, "/api/stats", Host=host).status == status


def test_nor_is_one_by_a_service_that_is_open_to_its_network() -> None:
    open_to_all = HttpServer({}, "0.0.0.0", 0)
    for host in ("10.0.0.1:7042", "localhost", socket.gethostname(), f"{socket.gethostname()}:7042"):
        assert open_to_all.refusal_of(host, "") is None
    refusal = open_to_all.refusal_of("evil.example", "")
    assert refusal is not None
    assert b"has no token" in refusal.body
    with_tls = HttpServer({}, "0.0.0.0", 0, context=context())
    assert with_tls.refusal_of("controller.example", "") is None


# --- TLS


def test_with_tls_certificates_and_token_are_wanted(secured: Server) -> None:
    assert ask(secured.http_address, "/api/stats", context=context()).status == 401
    answer = ask(secured.http_address, "/api/stats", context=context(), Authorization=f"Bearer {TOKEN}")
    assert answer.status == 200


@pytest.mark.parametrize("certificate", [None, "stranger"])
def test_with_tls_nobody_without_a_certificate_gets_anywhere(
    secured: Server, certificate: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OSError), caplog.at_level(logging.WARNING):  # noqa: PT011 (how it ends is up to both ends)
        ask(secured.http_address, "/healthz", context=context(certificate))
    assert not [record for record in caplog.records if record.name.startswith("dataplane.protocol.http")]


def test_who_does_not_speak_tls_gets_nothing(secured: Server) -> None:
    with socket.create_connection(split_address(secured.http_address), timeout=WAIT_S) as peer:
        peer.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"ok" not in peer.recv(100)


def test_the_certificate_is_the_services(secured: Server) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(secured.http_address, "/healthz", context=context(authority="other-ca"))


# --- its run


def test_a_port_that_is_taken_fails_the_start_and_leaves_nothing(server: Server) -> None:
    port = split_address(server.http_address)[1]
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
        serve({"capacity_bytes": MIB, "http_port": port})


def test_it_ends_with_its_service() -> None:
    with serve({"capacity_bytes": MIB, "http_port": 0}) as server:
        address = server.http_address
        assert ask(address, "/healthz").status == 200
    with pytest.raises(ConnectionRefusedError):
        ask(address, "/healthz")


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="http_port"):
        DataPlaneConfig(http_port=port)


def test_units_come_after_their_service() -> None:
    config = DataPlaneConfig(port=7200, http_port=9000)
    assert [config.of_unit(number).http_port for number in range(2)] == [9001, 9002]
    assert (DataPlaneConfig(http_port=0).of_unit(3).http_port, DataPlaneConfig().of_unit(3).http_port) == (0, None)
