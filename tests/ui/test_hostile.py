"""Names are what users typed: the page shows them, and does nothing they say."""

from __future__ import annotations

import re
from urllib.request import urlopen

import pytest
import torch

from dataplane import Server, connect
from tests.ui import scene
from tests.ui.conftest import Visitor

pytestmark = [pytest.mark.browser, pytest.mark.slow]

EVIL = '<img src=x onerror="window.hit=1">'
SCRIPT = "<script>window.hit=2</script>"
QUOTES = "\"'`${window.hit=3}&lt;\\"


def test_names_are_shown_and_not_obeyed(service: Server, visit: Visitor) -> None:
    seen = visit(service.http_address)
    with connect(service.address, client_name=EVIL) as client:
        client.register_partition(EVIL, [SCRIPT, "logprobs", "input_ids"], num_samples=9, consumer_tasks=[EVIL, QUOTES])
        client.put_samples([EVIL, SCRIPT], EVIL, {SCRIPT: ["x", "y"]}, tags=[{EVIL: SCRIPT}] * 2)
        client.set_version(EVIL, 2)
        with scene.waiting(service, EVIL, EVIL, name=SCRIPT):
            page = seen.open()
            seen.until(".partition .title", EVIL)
            seen.until(".row .name", SCRIPT)
            seen.until(".tasks .why", QUOTES)
            seen.until("#waits", SCRIPT)
            seen.until(".attention li", f"Task {EVIL} of {EVIL}: {SCRIPT} has waited")
            seen.until(".attention .sentence", "no client has produced")  # what is below it stays where it is
            seen.until(".lane", EVIL)
            page.get_by_role("button", name=EVIL, exact=True).click()
            seen.until(".tasks .sentence", "no client has produced")
            page.locator(".matrix canvas").hover(position={"x": 5, "y": 5})
            seen.until(".tip strong", SCRIPT)
            page.get_by_label("sample id").fill(EVIL)
            page.keyboard.press("Enter")
            seen.until("#lookup-result h3", EVIL)
            seen.until("#lookup-result td", SCRIPT)
            page.get_by_label("sample id").fill(SCRIPT * 2)
            page.keyboard.press("Enter")
            seen.until("#lookup-result .problem", SCRIPT)
            page.locator(".inner summary").click()
            seen.until("#clients", EVIL)
            assert page.evaluate("window.hit") is None
            assert page.locator("img").count() == 1  # its own sign
            assert page.locator("script").count() == 1
            assert seen.asked("x") == 0
    seen.expected.append("status of 404")


def test_the_page_may_do_nothing_but_ask_its_service(service: Server, visit: Visitor) -> None:
    with urlopen(f"http://{service.http_address}/") as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert re.search(r"default-src '(none|self)'", policy)
    seen = visit(service.http_address)
    page = seen.open()
    seen.expected += ["Content Security Policy", "TrustedHTML", "TrustedScript"]
    for forbidden in (
        "document.body.innerHTML = '<b>bold</b>'",
        "document.write('x')",
        "setTimeout('window.hit = 1')",
    ):
        assert page.evaluate(f"() => {{ try {{ {forbidden} }} catch (error) {{ return error.name }} }}"), forbidden
    sent = "fetch('http://127.0.0.1:1/').then(() => 'sent', (error) => error.name)"
    assert page.evaluate(sent) == "TypeError"
    assert page.evaluate("window.hit") is None


def test_every_field_of_many_and_long_names(service: Server, visit: Visitor) -> None:
    """A narrow screen still shows no more than its width."""
    long = "a_very_long_name_" * 12
    fields = [f"field_{number}" for number in range(40)] + [long]
    with connect(service.address, client_name=long) as client:
        client.register_partition(long, fields, num_samples=None, consumer_tasks=[long])
        client.put_samples([long], long, {long: torch.ones(1)})
        seen = visit(service.http_address, viewport={"width": 400, "height": 4000})
        page = seen.open()
        seen.until(".row .name", long)
        assert page.locator(".row").count() == len(fields) + 1
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
