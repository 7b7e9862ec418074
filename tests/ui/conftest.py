"""A real browser without a screen, and what a test sees of the page through it. Screenshots are kept in out/ui."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, sync_playwright

from dataplane import DataPlaneClient, Server, connect, serve
from tests.children import START_S

PICTURES = Path(__file__).parents[2] / "out" / "ui"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 40_000.0
WIDE = {"width": 1360, "height": 2400}
"""So high that every part of the page is in view, and asked for."""


class Visit:
    """A page in a browser of its own, which is watched: `requests` are the addresses that it asked for, `faults` what
    it should not have done."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.origin = origin
        self.requests: list[str] = []
        self.faults: list[str] = []
        self.expected: list[str] = []
        self._unanswered = 0
        context.set_default_timeout(WAIT_MS)
        context.on("request", self._requested)
        context.on("requestfinished", self._answered)
        context.on("requestfailed", self._answered)
        self.page = context.new_page()
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.faults.append(f"raised {error}"))

    def _requested(self, request: Request) -> None:
        self.requests.append(request.url)
        if not request.url.startswith(f"{self.origin}/"):
            self.faults.append(f"asked {request.url}")
        self._unanswered += self._is_of_a_round(request)

    def _answered(self, request: Request) -> None:
        self._unanswered -= self._is_of_a_round(request)

    def _is_of_a_round(self, request: Request) -> bool:
        return request.url.startswith(f"{self.origin}/api/")

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"said {message.text}")

    def open(self) -> Page:
        """The dashboard, when it has shown what there is for the first time."""
        self.page.goto(self.origin)
        self.page.wait_for_selector("[data-ready]")
        self.until("#connection", "live")
        return self.page

    def asked(self, path: str) -> int:
        """How often this was asked for."""
        return sum(url.startswith(f"{self.origin}/{path}") for url in self.requests)

    def settle(self) -> None:
        """Returns when all that the page asked is answered, and what it asks upon those answers."""
        quiet = 0
        while quiet < 3:
            self.page.evaluate("() => fetch('healthz').then((answer) => answer.text())")
            quiet = 0 if self._unanswered else quiet + 1

    def until(self, selector: str, text: str) -> None:
        """Waits until an element that `selector` finds has `text` in it."""
        self.page.locator(selector, has_text=text).first.wait_for()

    def keep(self, name: str) -> None:
        """A picture of how the page looks now."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{name}.png", full_page=True)

    def unexpected(self) -> list[str]:
        return [fault for fault in self.faults if not any(re.search(known, fault) for known in self.expected)]


Visitor = Callable[..., Visit]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Ends with this folder's tests: while it runs, its thread can have no event loop of its own."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"there is none of {', '.join(BROWSERS)} here (apt-get install chromium)")
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, timeout=1000 * START_S)
        yield started
        started.close()


@contextlib.contextmanager
def visitor(browser: Browser, name: str) -> Iterator[Visitor]:
    """Opens pages; at the end each leaves its picture, and must have kept to its origin and said no error. What a test
    means to go wrong it adds to `expected`, as patterns."""
    visits: list[Visit] = []
    contexts: list[BrowserContext] = []

    def start(address: str, *, scheme: str = "http", **settings: Any) -> Visit:
        contexts.append(browser.new_context(**{"viewport": WIDE, "color_scheme": "light", **settings}))
        visits.append(Visit(contexts[-1], f"{scheme}://{address}"))
        return visits[-1]

    yield start
    name = re.sub(r"[\W_]+", "-", name.removeprefix("test_")).strip("-")
    for number, one in enumerate(visits):
        one.keep(f"{name}-{number}" if number else name)
    for context in contexts:
        context.close()
    assert not (found := [fault for one in visits for fault in one.unexpected()]), found


@pytest.fixture
def visit(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Visitor]:
    """See `visitor`."""
    with visitor(browser, request.node.name) as start:
        yield start


@pytest.fixture
def service() -> Iterator[Server]:
    with serve({"capacity_bytes": 64 << 20, "http_port": 0}) as server:
        yield server


@pytest.fixture
def client(service: Server) -> Iterator[DataPlaneClient]:
    with connect(service.address, client_name="rollout-0") as client:
        yield client
