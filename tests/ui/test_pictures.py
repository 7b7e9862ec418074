"""What is painted: colours where they belong, and what the pictures answer to mouse and keyboard."""

from __future__ import annotations

import re

import pytest
import torch
from playwright.sync_api import Locator, Route

from dataplane import DataPlaneClient, Server, connect, serve
from tests.ui import scene
from tests.ui.conftest import Visit, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PIXEL = """(canvas, [x, y]) => {
  const ratio = canvas.width / canvas.clientWidth;
  const copy = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, -Math.round(x * ratio), -Math.round(y * ratio));
  const [r, g, b, a] = copy.getImageData(0, 0, 1, 1).data;
  return a === 255 ? "#" + [r, g, b].map((part) => part.toString(16).padStart(2, "0")).join("") : "";
}"""
UPPER_HALF = """(canvas) => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height / 2);
  const found = new Set();
  for (let at = 0; at < data.length; at += 4) found.add((data[at] << 16) | (data[at + 1] << 8) | data[at + 2]);
  return [...found].map((colour) => "#" + colour.toString(16).padStart(6, "0"));
}"""
COLOUR = "(name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()"
FIELD, TASK = ["input_ids", "reward", "logprobs"], ["reference", "policy"]


def painted(picture: Locator, x: float, y: float) -> str:
    found: str = picture.evaluate(PIXEL, [x, y])
    return found


def colours(seen: Visit, *names: str) -> list[str]:
    return [seen.page.evaluate(COLOUR, name) for name in names]


def until_painted(seen: Visit, picture: Locator, x: float, y: float, colour: str) -> None:
    seen.page.wait_for_function(
        f"([canvas, at, colour]) => ({PIXEL})(canvas, at) === colour", arg=[picture.element_handle(), [x, y], colour]
    )


def test_holes_and_claims_are_where_they_are(service: Server, client: DataPlaneClient, visit: Visitor) -> None:
    scene.produce(client)
    seen = visit(service.http_address)
    seen.open()
    picture = seen.page.locator(".matrix canvas")
    full, empty, leased, claimed, unclaimed = colours(seen, "full", "empty", "leased", "claimed", "unclaimed")
    seen.until(".row", "policy")
    until_painted(seen, picture, 11, 10, full)

    def row(number: int) -> list[str]:
        y = 20 * number + 10 + (10 if number >= len(FIELD) else 0)
        points = [[22 * column + 10, y] for column in range(scene.SAMPLES)]
        found: list[str] = picture.evaluate(f"(canvas, points) => points.map((at) => ({PIXEL})(canvas, at))", points)
        return found

    missing = scene.SAMPLES - scene.REWARDED
    assert row(0) == [full] * scene.SAMPLES
    assert row(1) == [full] * scene.REWARDED + [empty] * missing
    assert row(2) == [empty] * scene.SAMPLES
    taken = [leased] * scene.LEASED + [claimed] * scene.CLAIMED
    assert row(3) == taken + [unclaimed] * (scene.SAMPLES - len(taken))
    assert row(4) == [unclaimed] * scene.SAMPLES


def test_parts_of_many_samples_are_shaded_by_their_share(
    service: Server, client: DataPlaneClient, visit: Visitor
) -> None:
    """Of each part of the second half every other sample has a score."""
    names = scene.ids(4000)
    client.register_partition("train", ["score"], num_samples=None, consumer_tasks=["policy"])
    client.put_samples(names, "train", {"index": torch.arange(4000)})
    some = names[:2000] + names[2000::2]
    client.put_samples(some, "train", {"score": torch.ones(len(some))})
    seen = visit(service.http_address)
    seen.open()
    seen.until(".row", "75%")
    picture = seen.page.locator(".matrix canvas")
    score, width = 10 if seen.page.locator(".row").first.inner_text().startswith("score") else 30, 1000
    full, empty = colours(seen, "full", "empty")
    until_painted(seen, picture, 20, score, full)
    half = painted(picture, width, score)
    assert half not in (full, empty, "")
    picture.hover(position={"x": 20, "y": score})
    seen.until(".tip strong", "field score")
    seen.until(".tip", "of 4,000 by age")


def test_the_matrix_answers_the_mouse(service: Server, client: DataPlaneClient, visit: Visitor) -> None:
    scene.produce(client)
    generations = client.list_samples("train")
    seen = visit(service.http_address)
    page = seen.open()
    seen.until(".row", "policy")
    picture = page.locator(".matrix canvas")
    picture.hover(position={"x": 22 * 20 + 5, "y": 30})
    seen.until(".tip strong", "field reward")
    seen.until(".tip", "sample 21 of 24 by age, generation ")
    seen.until(".tip", "0 of 1 produced")
    picture.hover(position={"x": 22 * 2 + 5, "y": 80})
    seen.until(".tip strong", "task reference")
    seen.until(".tip", "1 on lease")
    page.mouse.move(5, 5)
    page.locator(".tip").wait_for(state="hidden")
    assert generations.size == scene.SAMPLES


def test_the_matrix_answers_the_keyboard_and_says_it_aloud(
    service: Server, client: DataPlaneClient, visit: Visitor
) -> None:
    scene.produce(client)
    seen = visit(service.http_address)
    page = seen.open()
    seen.until(".row", "policy")
    picture = page.locator(".matrix canvas")
    spoken = picture.get_attribute("aria-label") or ""
    assert "24 samples by age. input_ids 100% produced, reward 67% produced" in spoken
    picture.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    seen.until("[aria-live=polite].unseen", "field reward. sample 2 of 24 by age")
    page.keyboard.press("Escape")
    page.locator(".tip").wait_for(state="hidden")


def test_memory_is_shown_by_address(service: Server, client: DataPlaneClient, visit: Visitor) -> None:
    client.register_partition("train", ["image"], num_samples=None, consumer_tasks=[])
    client.put_samples(["a", "b"], "train", {"image": torch.zeros(2, 16 << 20, dtype=torch.uint8)})
    seen = visit(service.http_address)
    page = seen.open()
    seen.until(".arena .key.live", "32.0 MiB")
    strip = page.locator(".strip")
    live, free, pinned = colours(seen, "live", "free", "pinned")
    width = strip.evaluate("(canvas) => canvas.clientWidth")
    until_painted(seen, strip, 0.2 * width, 20, live)
    assert painted(strip, 0.7 * width, 20) == free
    held = client.get_samples(["a"], "train", ["image"], copy=False)
    until_painted(seen, strip, 0.2 * width, 56, pinned)
    seen.until(".arena .key.pinned", "32.0 MiB")
    strip.hover(position={"x": 0.2 * width, "y": 20})
    seen.until(".tip strong", " to ")
    seen.until(".tip", "pinned")
    assert held["image"].shape == (1, 16 << 20)


def test_a_drained_unit_says_so(visit: Visitor) -> None:
    with serve({"capacity_bytes": 16 << 20, "units": 2, "http_port": 0}) as server, connect(server.address) as client:
        seen = visit(server.http_address)
        page = seen.open()
        seen.until(".arena .told", "limit for new rows")
        client.drain(1)
        seen.expected.append("net::ERR")  # the service ends before the page
        seen.until(".arena .told", "draining, gets no new rows")
        assert page.locator(".arena .told", has_text="limit for new rows").count() == 1


def test_flow_is_charted(service: Server, client: DataPlaneClient, visit: Visitor) -> None:
    scene.produce(client)
    seen = visit(service.http_address)
    page = seen.open()
    chart = page.locator("canvas.chart").first
    seen.until("figure", "samples per second")
    seen.until("figure", "live 21.0 KiB")
    page.get_by_label("last").select_option("60")
    client.put_samples(["late"], "train", {"reward": torch.ones(1)})
    (put,) = colours(seen, "put")
    page.wait_for_function(
        f"([canvas, colour]) => ({UPPER_HALF})(canvas).includes(colour)", arg=[chart.element_handle(), put]
    )
    chart.focus()
    page.keyboard.press("ArrowLeft")
    seen.until("[aria-live=polite].unseen", "put ")


def test_calls_have_their_place_in_time(service: Server, client: DataPlaneClient, visit: Visitor) -> None:
    seen = visit(service.http_address)
    page = seen.open()
    scene.produce(client)
    with scene.waiting(service):
        seen.until(".lane", "policy-0")
        assert page.locator(".lane").all_inner_texts() == ["rollout-0", "policy-0"]
        seen.until("#timeline-told", "30 s, following")
        picture = page.locator("#timeline canvas")
        picture.focus()
        page.keyboard.press("ArrowRight")
        seen.until("[aria-live=polite].unseen", "get input_ids. rollout-0, partition train. 8 samples")
        for _ in range(9):
            page.keyboard.press("ArrowLeft")
        seen.until("[aria-live=polite].unseen", "put input_ids. rollout-0, partition train. 24 samples")
        page.keyboard.press("ArrowDown")
        seen.until("[aria-live=polite].unseen", "claim policy. policy-0, partition train. waits since")
        page.get_by_role("button", name="show less time").click()
        seen.until("#timeline-told", "15 s, following")
        page.get_by_role("button", name="earlier").click()
        seen.until("#timeline-told", "15 s, until ")
        page.get_by_role("button", name="Follow").click()
        seen.until("#timeline-told", "1 min, following")


def test_of_many_units_those_in_view_are_asked_for(service: Server, client: DataPlaneClient, visit: Visitor) -> None:
    """128, of which the service has one; the others are made up on the way to the page."""
    scene.produce(client)
    seen = visit(service.http_address, viewport={"width": 1000, "height": 700})

    def many(route: Route) -> None:
        stats = route.fetch().json()
        (unit,) = stats["units"]
        stats["units"] = [{**unit, "unit": number, "name": f"unit-{number}"} for number in range(1, 129)]
        route.fulfill(json=stats)

    def any_unit(route: Route) -> None:
        route.fulfill(response=route.fetch(url=re.sub(r"unit=\d+", "unit=1", route.request.url)))

    seen.page.route("**/api/stats", many)
    seen.page.route("**/api/memory?*", any_unit)
    page = seen.open()
    assert page.locator(".arena").count() == 128
    page.locator(".arena").nth(100).scroll_into_view_if_needed()
    seen.until(".arena:nth-child(101) .legend", "live")
    asked = {url.partition("unit=")[2].partition("&")[0] for url in seen.requests if "api/memory" in url}
    assert "101" in asked
    assert len(asked) < 32
    assert page.evaluate("document.documentElement.scrollWidth") <= 1000
    assert page.evaluate("document.documentElement.scrollHeight") < 5000, "what comes after them is near"
    page.unroute_all(behavior="ignoreErrors")
