"""What a person sees of a run."""

from __future__ import annotations

import pytest
import torch

from dataplane import DataPlaneClient, Server, connect
from dataplane.controller import http_server
from tests.ui import scene
from tests.ui.conftest import Visitor

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_a_run_is_seen_at_a_glance(service: Server, client: DataPlaneClient, visit: Visitor) -> None:
    scene.produce(client)
    seen = visit(service.http_address)
    with scene.waiting(service):
        page = seen.open()
        assert page.inner_text("#address") == service.http_address
        assert page.inner_text("#epoch") == f"epoch {client.stats().epoch}"
        assert page.inner_text("#connection") == "live"
        assert page.inner_text("#tile-live") == "24"
        assert page.inner_text("#tile-waits") == "1"
        told = page.inner_text(".partition .told")
        assert told.startswith("version 4 · 24 live · 24 of 64 born · ")
        seen.until("#waits tr", "policy-0")
        cells = page.locator("#waits tr").first.locator("th, td").all_inner_texts()
        assert cells[:6] == ["policy-0", "claim for policy", "train", "input_ids, logprobs", "4 samples", "0 ready"]
        assert cells[7].startswith("in 2 h ")
        seen.until(".attention li.warn", "Task policy of train: policy-0 has waited")
        seen.until(".attention .sentence", "no client has produced field 'logprobs' for any live sample")
        seen.until("#health", "1 needs attention")
    seen.until("#no-waits", "No calls are waiting.")
    seen.until("#health", "healthy")


def test_calls_that_wait_and_are_not_listed_are_told_of(
    service: Server, client: DataPlaneClient, visit: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "WAITS", 1)
    scene.produce(client)
    seen = visit(service.http_address)
    with scene.waiting(service), scene.waiting(service, name="policy-1"):
        page = seen.open()
        seen.until("#some-waits", "The 1 longest-waiting of 2 calls.")
        assert page.locator("#waits tr").count() == 1
        assert page.inner_text("#tile-waits") == "2"
    seen.until("#no-waits", "No calls are waiting.")
    assert page.locator("#some-waits").is_hidden()


def test_the_figures_of_every_field_and_task(service: Server, client: DataPlaneClient, visit: Visitor) -> None:
    scene.produce(client)
    seen = visit(service.http_address)
    page = seen.open()
    seen.until(".row", "logprobs")
    rows = [row.split("\n") for row in page.locator(".row").all_inner_texts()]
    assert rows == [
        ["input_ids", "100%"],
        ["reward", "67%"],
        ["logprobs", "0%"],
        ["reference", "50%"],
        ["policy", "0%"],
    ]
    lines = {line.locator("th").inner_text(): line for line in page.locator(".tasks tbody tr:visible").all()}
    # task: claims, ready, on lease, held, claimed, waiting, lag
    assert lines["reference"].locator("td").all_inner_texts() == ["input_ids", "12", "8", "0", "12", "–", "1"]
    assert lines["policy"].locator("td").all_inner_texts() == ["–", "24", "0", "0", "0", "–", "–"]


def test_without_a_version_there_is_no_lag(service: Server, client: DataPlaneClient, visit: Visitor) -> None:
    client.register_partition("train", ["reward"], num_samples=None, consumer_tasks=["policy"])
    client.put_samples(["a", "b"], "train", {"reward": torch.ones(2)}, tags=[{"weight_version": 354}] * 2)
    client.claim_meta("train", "policy", ["reward"], 1)
    page = visit(service.http_address).open()
    (line,) = page.locator(".tasks tbody tr:visible").all()
    assert line.locator("td").all_inner_texts() == ["reward", "1", "0", "0", "1", "–", "version not set"]


def test_why_a_task_waits_is_said_when_asked(service: Server, client: DataPlaneClient, visit: Visitor) -> None:
    scene.produce(client)
    client.put_samples(scene.ids(3), "train", {"logprobs": [torch.zeros(5)] * 3})
    seen = visit(service.http_address)
    with scene.waiting(service):
        page = seen.open()
        button = page.get_by_role("button", name="policy", exact=True)
        assert button.get_attribute("aria-expanded") == "false"
        button.click()
        seen.until(".tasks .sentence", "of 24 unclaimed live samples 3 have all fields (21 lack 'logprobs')")
        assert button.get_attribute("aria-expanded") == "true"
        client.put_samples(scene.ids(2), "train", {"input_ids": [torch.arange(3)] * 2})
        seen.until(".tasks .sentence", "'rollout-0'")
        button.click()
        assert page.locator(".tasks .sentence:visible").count() == 0


def test_what_changes_is_shown_without_touching_the_rest(
    service: Server, client: DataPlaneClient, visit: Visitor
) -> None:
    scene.produce(client)
    seen = visit(service.http_address)
    page = seen.open()
    seen.until(".row", "policy")
    button = page.get_by_role("button", name="reference", exact=True)
    button.focus()
    page.evaluate("window.before = [...document.querySelectorAll('.row, .tasks tr, .arena, canvas')]")
    client.put_samples(["late"], "train", {"reward": torch.ones(1), "input_ids": [torch.arange(9)]})
    seen.until("#tile-live", "25")
    seen.until(".row", "68%")
    assert page.evaluate("window.before.every((node) => node.isConnected)")
    assert page.evaluate("document.activeElement.textContent") == "reference"
    client.register_partition("val", ["input_ids"], num_samples=2, consumer_tasks=["evaluate"])
    seen.until(".partition .title", "val")
    page.get_by_role("button", name="evaluate", exact=True).focus()
    seen.expected.append("status of 404")  # it may go between two questions
    client.clear_samples(None, "train")
    page.locator(".partition .title", has_text="train").wait_for(state="detached")
    seen.until("#tile-live", "0")
    assert page.evaluate("document.activeElement.textContent") == "evaluate"  # what stays is not moved either


def test_a_service_that_holds_nothing_says_so(service: Server, visit: Visitor) -> None:
    seen = visit(service.http_address)
    page = seen.open()
    assert page.locator("#no-partitions").is_visible()
    assert page.locator("#no-waits").is_visible()
    assert page.inner_text("#health") == "healthy"
    assert page.inner_text("#tile-memory-more") == "0 B of 64.0 MiB"


def test_a_full_arena_is_told_of(service: Server, client: DataPlaneClient, visit: Visitor) -> None:
    client.register_partition("train", ["image"], num_samples=None, consumer_tasks=[], budget_bytes=8 << 20)
    client.put_samples(["a"], "train", {"image": [torch.zeros(13 << 19, dtype=torch.uint8)]})
    seen = visit(service.http_address)
    page = seen.open()
    seen.until(".attention li", "Partition train is near its budget: 96% of the space for new rows is used.")
    assert page.inner_text(".budget span").startswith("budget: 6.5 MiB of 8.0 MiB (81%), peak 6.5 MiB; when full, ")
    with connect(service.address, client_name="rollout-1", put_timeout_s=600.0) as other, scene.putting(other):
        seen.until(".attention li.bad", "A put of rollout-1 has waited")
        seen.until("#waits tr", "4.0 MiB")
        assert page.locator("#waits .op").inner_text() == "put"
        client.clear_samples(["a"], "train")
        seen.until("#no-waits", "No calls are waiting.")


def test_a_sample_is_looked_up_by_its_id(service: Server, client: DataPlaneClient, visit: Visitor) -> None:
    scene.produce(client)
    client.set_tags(["sample-1"], "train", [{"seed": (1 << 63) - 1, "x,": ':12345678901234567,"', "share": 1 / 3}])
    seen = visit(service.http_address)
    page = seen.open()
    page.get_by_label("sample id").fill("sample-1")
    page.get_by_role("button", name="Show", exact=True).click()
    seen.until("#lookup-result h3", "sample-1")
    told = page.inner_text("#lookup-result")
    assert "on lease by rollout-0, for another" in told
    assert "jagged int64" in told
    assert "808 B" in told  # 101 tokens
    assert "not produced: logprobs" in told
    assert "weight_version" in told
    assert str((1 << 63) - 1) in told
    assert r'":12345678901234567,\""' in told
    assert str(1 / 3) in told
    page.get_by_label("sample id").fill("nobody")
    page.keyboard.press("Enter")
    seen.until("#lookup-result .problem", "nobody")
    seen.expected.append("status of 404")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_and_narrow(service: Server, client: DataPlaneClient, visit: Visitor, scheme: str) -> None:
    scene.produce(client)
    seen = visit(service.http_address, color_scheme=scheme, viewport={"width": 380, "height": 4000})
    page = seen.open()
    seen.until(".row", "policy")
    page.get_by_label("sample id").fill("sample-1")
    page.keyboard.press("Enter")
    seen.until("#lookup-result h3", "sample-1")
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    brightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert (brightness < 60) == (scheme == "dark")
