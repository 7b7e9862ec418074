"""What goes through a service, as `tq top --http` shows it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch

from dataplane import DataPlaneConfig, ServiceUnavailableError, connect, serve
from dataplane.cli import main
from dataplane.cli.top import fetch_rates, parse_http_address
from dataplane.config import MIB
from tests.restarts import wait_until
from tests.secure import tls

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer to answer than somebody who watches would wait."""
    monkeypatch.setattr("dataplane.cli.top._WAIT_S", 60.0)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("8000", ("host", 8000)),
        ("other:8000", ("other", 8000)),
        ("http://other:8000", ("other", 8000)),
        ("https://other:8000/metrics", ("other", 8000)),
        ("[::1]:8000", ("::1", 8000)),
    ],
)
def test_where_it_is(text: str, place: tuple[str, int]) -> None:
    assert parse_http_address(text, "host:7000") == place


@pytest.mark.parametrize("text", ["", "http://other", "host:port", "http://[::1"])
def test_what_is_no_place(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "127.0.0.1:1", "--http", text]) == 2
    assert "is not a URL" in capsys.readouterr().err


@pytest.mark.parametrize("security", [{}, {"token": "secret"}, {"token": "secret", **tls()}])
def test_samples_and_bytes_a_second(security: dict[str, Any]) -> None:
    with serve({"capacity_bytes": 8 * MIB, "http_port": 0, **security}) as server:
        config = DataPlaneConfig(address=server.address, **security)
        with connect(server.address, **security) as client:
            client.register_partition("train", ["x"], None, ["policy"])
            client.put_samples(["a", "b"], "train", {"x": torch.zeros(2, 256)})
            client.get_samples(["a"], "train", ["x"])
        place = parse_http_address(server.http_address, server.address)
        wait_until(lambda: fetch_rates(place, config, 60).gets > 0)
        found = fetch_rates(place, config, 60)
        assert found.puts == pytest.approx(2 / 60)
        assert found.put_bytes == pytest.approx(2048 / 60)
        assert found.gets == pytest.approx(1 / 60)


def test_top_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with serve({"capacity_bytes": 8 * MIB, "http_port": 0}) as server:
        arguments = ["top", server.address, "--once", "--interval", "0.1", "--http"]
        assert main([*arguments, f"http://{server.http_address}/"]) == 0
        assert "per second: 0 samples put (0 B), 0 got (0 B), 0 claimed, 0 cleared" in capsys.readouterr().out
        assert main([*arguments, server.http_address.rpartition(":")[2], "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["flow"]
        assert told == {"puts": 0, "put_bytes": 0, "gets": 0, "get_bytes": 0, "claims": 0, "clears": 0}


def test_a_wrong_token_is_said() -> None:
    with (
        serve({"units": 0, "http_port": 0, "token": "secret"}) as server,
        pytest.raises(ServiceUnavailableError, match="401"),
    ):
        fetch_rates(parse_http_address(server.http_address, ""), DataPlaneConfig(token="guess"), 1)


def test_the_wrong_port_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with serve({"units": 0}) as server:
        assert main(["top", server.address, "--once", "--http", "1"]) == 1
        assert "Connection refused" in capsys.readouterr().err


@contextmanager
def web_server(body: bytes) -> Iterator[tuple[str, int]]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[0], server.server_port  # type: ignore[misc]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"puts": 1}'])
def test_something_else_that_answers_is_said(body: bytes) -> None:
    with web_server(body) as place, pytest.raises(ServiceUnavailableError, match="pass the port that"):
        fetch_rates(place, DataPlaneConfig(), 1)
