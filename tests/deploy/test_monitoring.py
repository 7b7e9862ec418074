"""deploy/prometheus and deploy/grafana: what they name is exported, and what Prometheus' own tool says of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dataplane.core.metrics import CATALOGUE
from tests.documents import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
RULES = yaml.safe_load((PROMETHEUS / "tq.rules.yml").read_text(encoding="utf-8"))
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "tq.json").read_text(encoding="utf-8"))
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OTHERS = {"up", "process_resident_memory_bytes"}
OF_SCRAPES = {"job", "instance"}
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")


def exported() -> dict[str, set[str]]:
    """Every series that there is, with its labels."""
    found: dict[str, set[str]] = {"up": set(), "process_resident_memory_bytes": set()}
    for family in CATALOGUE:
        if family.kind == "histogram":
            found |= {f"{family.name}_{part}": set(family.labels) for part in ("sum", "count")}
            found[f"{family.name}_bucket"] = {*family.labels, "le"}
        else:
            found[family.name] = set(family.labels)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of everything that is asked."""
    for alert in ALERTS:
        yield alert["alert"], alert["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], re.sub(r"label_values\((\w+), (\w+)\)", r'\1{\2="x"}', variable["query"]["query"])


ASKED = list(expressions())


@pytest.mark.parametrize(("where", "expr"), ASKED, ids=[f"{where}-{n}" for n, (where, _) in enumerate(ASKED)])
def test_what_is_asked_for_is_exported(where: str, expr: str) -> None:
    known = exported()
    named = set(re.findall(r"\b(?:tq_\w+|up|process_\w+)\b", re.sub(r'"[^"]*"', "", expr)))
    assert named
    assert named <= set(known), f"{where}: nobody exports {named - set(known)}"
    for name, matchers in re.findall(r"\b(tq_\w+)\{([^}]*)\}", expr):
        labels = set(re.findall(r"(\w+)\s*[=!]~?\s*\"", matchers))
        assert labels <= known[name] | OF_SCRAPES, f"{where}: {name} has no label {labels - known[name]}"
    allowed = set.union(*(known[name] for name in named)) | OF_SCRAPES
    for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", expr):
        assert set(re.split(r",\s*", grouped)) <= allowed, where


@pytest.mark.parametrize("alert", ALERTS, ids=[alert["alert"] for alert in ALERTS])
def test_an_alert_names_labels_that_its_metric_has(alert: dict[str, Any]) -> None:
    known = exported()
    named = set(re.findall(r"\b(?:tq_\w+|up)\b", re.sub(r'"[^"]*"', "", alert["expr"])))
    allowed = set.union(*(known[name] for name in named)) | OF_SCRAPES
    shown = set(re.findall(r"\$labels\.(\w+)", json.dumps(alert["annotations"])))
    assert shown <= allowed
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert alert["annotations"]["summary"]


def test_the_manual_says_what_to_do_about_every_alert() -> None:
    manual = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(Tq\w+)` \|", manual, re.M) == [alert["alert"] for alert in ALERTS]


def test_jobs_are_called_as_the_rules_call_them() -> None:
    jobs = {name for _, expr in ASKED for name in re.findall(r'job="([^"]+)"', expr)}
    scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert jobs <= {config["job_name"] for config in scraped}
    (in_kubernetes,) = yaml.safe_load((PROMETHEUS / "kubernetes.yml").read_text(encoding="utf-8"))["scrape_configs"]
    relabelled = [rule for rule in in_kubernetes["relabel_configs"] if rule.get("target_label") == "job"]
    assert jobs <= {rule["replacement"] for rule in relabelled}


def test_panels_of_the_dashboard_lie_beside_each_other() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_dashboard_is_found_where_it_is_mounted() -> None:
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text(encoding="utf-8"))
    (source,) = sources["datasources"]
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["current"]["value"] == source["uid"]
    used = {panel["datasource"]["uid"] for panel in PANELS}
    assert used == {"${datasource}"}
    providers = yaml.safe_load((GRAFANA / "provisioning/dashboards/tq.yml").read_text(encoding="utf-8"))["providers"]
    assert [provider["options"]["path"] for provider in providers] == ["/var/lib/grafana/dashboards"]


def run(*command: object, at: Path) -> None:
    done = subprocess.run([str(part) for part in command], cwd=at, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.integration
@promtool
def test_prometheus_takes_the_rules_and_they_fire_when_they_should() -> None:
    run("promtool", "check", "rules", "tq.rules.yml", at=PROMETHEUS)
    run("promtool", "test", "rules", "tq.rules.test.yml", at=PROMETHEUS)


@pytest.mark.integration
@promtool
@pytest.mark.parametrize("name", ["prometheus.yml", "kubernetes.yml"])
def test_prometheus_takes_the_scrape_configuration(name: str, tmp_path: Path) -> None:
    """Debian's Prometheus is built without Kubernetes: what is said about that is not for it."""
    config = yaml.safe_load((PROMETHEUS / name).read_text(encoding="utf-8"))
    (tmp_path / "token").write_text("secret")
    shutil.copy(PROMETHEUS / "tq.rules.yml", tmp_path)
    for scraped in config["scrape_configs"]:
        scraped["authorization"]["credentials_file"] = str(tmp_path / "token")
        scraped.pop("kubernetes_sd_configs", None)
    (tmp_path / name).write_text(yaml.safe_dump(config))
    run("promtool", "check", "config", name, at=tmp_path)


@pytest.mark.integration
@promtool
def test_prometheus_takes_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"x{number}", "expr": expr} for number, (_, expr) in enumerate(ASKED)]
    text = yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}).replace("$__rate_interval", "1m")
    (tmp_path / "all.yml").write_text(text)
    run("promtool", "check", "rules", "all.yml", at=tmp_path)
