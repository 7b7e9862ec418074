"""Who is let in, and what the page does when its service is slow, gone, or not looked at."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import torch
from playwright.sync_api import Error, Page, Route

from dataplane import Server, connect, serve
from tests.ports import free_ports
from tests.secure import tls
from tests.ui import scene
from tests.ui.conftest import Visit, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TOKEN = "open-sesame-7f3a"


def service_at(http_port: int, token: str | None = None) -> Server:
    return serve({"capacity_bytes": 64 << 20, "http_port": http_port, "token": token})


@pytest.fixture
def guarded() -> Iterator[Server]:
    with service_at(0, TOKEN) as server, connect(server.address, token=TOKEN, client_name="rollout-0") as client:
        client.register_partition("secret-partition", ["score"], num_samples=1, consumer_tasks=[])
        client.put_samples(["a"], "secret-partition", {"score": torch.ones(1)})
        yield server


def password(token: str) -> dict[str, dict[str, str]]:
    """What a browser sends once a person has entered the token."""
    return {"http_credentials": {"username": "me", "password": token}}


def try_now(page: Page) -> None:
    """Presses the button, if it is there: the page may have tried by itself."""
    page.evaluate("document.getElementById('try-now').click()")


def give_up_after(seen: Visit, ms: int) -> None:
    """The page that is opened next waits so long for an answer."""
    with urlopen(f"{seen.origin}/api.js") as answer:
        other = answer.read().decode().replace("DEADLINE_MS = 8000", f"DEADLINE_MS = {ms}")
    seen.page.route("**/api.js", lambda route: route.fulfill(content_type="text/javascript", body=other))


def pause_between_rounds(page: Page) -> None:
    """Presses the button the moment a round has ended: none is under way that would ask for more."""
    page.evaluate(
        """() => new Promise((done) => {
          new MutationObserver((_, observer) => {
            observer.disconnect();
            document.getElementById("pause").click();
            done();
          }).observe(document.documentElement, { attributes: true, attributeFilter: ["data-ready"] });
        })"""
    )


def test_only_the_token_opens_the_page(guarded: Server, visit: Visitor) -> None:
    wrong = visit(guarded.http_address, **password("open-sesame-7f3b"))
    wrong.expected.append("status of 401")
    wrong.page.goto(wrong.origin)
    assert "secret-partition" not in wrong.page.content()
    seen = visit(guarded.http_address, **password(TOKEN))
    seen.open()
    seen.until(".partition .title", "secret-partition")
    assert seen.page.context.cookies() == []
    assert TOKEN not in " ".join(seen.requests)
    seen.page.reload()
    seen.until(".partition .title", "secret-partition")


@pytest.mark.parametrize("path", ["", "main.js", "api/stats", "api/matrix?partition=secret-partition&columns=9"])
def test_without_the_token_nothing_is_told(guarded: Server, path: str) -> None:
    with pytest.raises(HTTPError, match="401") as refused:
        urlopen(f"http://{guarded.http_address}/{path}")
    with refused.value as answer:
        assert b"secret-partition" not in answer.read()


def test_a_service_with_tls_wants_a_certificate_as_well(visit: Visitor) -> None:
    files = tls()
    with serve({"capacity_bytes": 64 << 20, "http_port": 0, "token": TOKEN, **files}) as server:
        own = {
            "origin": f"https://{server.http_address}",
            "certPath": files["tls_cert_file"],
            "keyPath": files["tls_key_file"],
        }
        stranger = visit(server.http_address, scheme="https", ignore_https_errors=True)
        stranger.expected.append("net::ERR")
        with pytest.raises(Error, match="ERR_"):
            stranger.page.goto(stranger.origin)
        seen = visit(
            server.http_address,
            scheme="https",
            ignore_https_errors=True,
            client_certificates=[own],
            **password(TOKEN),
        )
        seen.expected.append("net::ERR")
        seen.open()


def test_another_token_asks_for_it_again(visit: Visitor) -> None:
    """The service came back with another token: the page goes."""
    port = free_ports()
    with service_at(port, TOKEN) as first:
        seen = visit(first.http_address, **password(TOKEN))
        seen.expected += ["status of 401", "net::ERR"]
        seen.open()
    with service_at(port, f"{TOKEN}-2"):
        seen.until("body", "this service requires its token")


def test_a_lost_connection_is_said_and_found_again(visit: Visitor) -> None:
    port = free_ports()
    seen = visit(f"127.0.0.1:{port}")
    seen.expected.append("net::ERR")
    with service_at(port) as first, connect(first.address) as client:
        client.register_partition("train", ["score"], num_samples=None, consumer_tasks=[])
        page = seen.open()
        seen.until(".partition .title", "train")
        assert page.locator("#lost").is_hidden()
        epoch = page.inner_text("#epoch")
    seen.until("#connection", "connection lost")
    seen.until("#lost-why", "Connection lost: no response from this address. The data below is from ")
    seen.until("#lost-next", "next try in")
    assert page.locator(".partition .title").inner_text() == "train"  # what was known stays
    seen.keep("lost")
    with service_at(port):
        try_now(page)
        seen.until("#connection", "live")
        page.locator("#lost").wait_for(state="hidden")
        page.locator("#no-partitions").wait_for()
        assert page.inner_text("#epoch") != epoch


def test_a_slow_service_is_not_asked_twice_at_once(service: Server, visit: Visitor) -> None:
    seen = visit(service.http_address)
    seen.page.clock.install()
    give_up_after(seen, 600_000)
    page = seen.open()
    held: list[Route] = []
    page.route("**/api/stats", lambda route: held.append(route))
    with page.expect_request("**/api/stats"):
        pass
    for _ in range(5):
        page.evaluate("window.dispatchEvent(new Event('online'))")
    page.clock.run_for(5000)  # longer than from one round to the next
    assert len(held) == 1
    with page.expect_request("**/api/stats"):
        held[0].continue_()
    page.unroute("**/api/stats")
    for route in held[1:]:
        route.continue_()
    seen.until("#connection", "live")


def test_an_answer_that_never_comes_is_given_up(service: Server, visit: Visitor) -> None:
    seen = visit(service.http_address)
    give_up_after(seen, 2000)
    page = seen.open()
    page.route("**/api/waits", lambda route: None)
    seen.until("#lost-why", "no answer within 2 s")
    page.unroute("**/api/waits")
    try_now(page)
    seen.until("#connection", "live")
    page.locator("#lost").wait_for(state="hidden")


def test_who_does_not_look_does_not_ask(service: Server, visit: Visitor) -> None:
    seen = visit(service.http_address)
    seen.page.add_init_script(
        "Object.defineProperty(document, 'hidden', {get: () => Boolean(window.away)});"
        "window.show = (shown) => { window.away = !shown; document.dispatchEvent(new Event('visibilitychange')); };"
    )
    seen.page.clock.install()
    page = seen.open()
    page.clock.pause_at(page.evaluate("Date.now()") / 1000 + 60)  # from now on its time goes on as the test says
    seen.settle()

    def rounds(seconds: int) -> int:
        """So many more, in so many seconds of the page's time."""
        before = seen.asked("api/stats")
        for _ in range(seconds):
            page.clock.run_for(1000)
            seen.settle()
        return seen.asked("api/stats") - before

    assert 2 <= rounds(6) <= 2 + 6  # a second of its time between two
    page.evaluate("window.show(false)")
    rounds(2)  # one that was planned
    assert rounds(10) <= 1
    before = seen.asked("api/stats")
    with page.expect_request("**/api/stats"):
        page.evaluate("window.show(true)")
    assert seen.asked("api/stats") == before + 1


def test_a_paused_page_stays_as_it_is(service: Server, visit: Visitor) -> None:
    seen = visit(service.http_address)
    with connect(service.address) as client:
        scene.produce(client)
        page = seen.open()
        seen.until("#tile-live", "24")
        pause_between_rounds(page)
        seen.until("#connection", "paused")
        before = seen.asked("api/")
        client.clear_samples(["sample-0"], "train")
        page.evaluate("window.dispatchEvent(new Event('online'))")
        page.evaluate("() => fetch('healthz').then((answer) => answer.text())")
        assert (seen.asked("api/"), page.inner_text("#tile-live")) == (before, "24")
        page.get_by_role("button", name="Resume").click()
        seen.until("#tile-live", "23")
