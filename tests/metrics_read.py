"""Prometheus' text for tests."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.web_client import ask


class Scrape:
    """What one /metrics says."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.kinds = {family.name + ("_total" if family.type == "counter" else ""): family for family in self.families}
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families
            for sample in family.samples
        }

    def value(self, name: str, /, **labels: str) -> float | None:
        """The sample's value; None if there is none."""
        return self.samples.get((name, tuple(sorted(labels.items()))))

    def labels(self, name: str, label: str) -> set[str]:
        """The label's values in all samples of that name."""
        return {dict(labels)[label] for found, labels in self.samples if found == name and label in dict(labels)}


def scrape(address: str, **headers: str) -> Scrape:
    answer = ask(address, "/metrics", **headers)
    assert answer.status == 200, answer.text
    return Scrape(answer.text)
