"""The manifests of deploy/ are what Kubernetes, KubeRay and compose take, and name what there is.

No cluster is here: schemas stand in for the first, and what they do not know is compared with this project.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from dataplane.cli.output import size
from dataplane.core.metrics import CATALOGUE
from tests.deploy.manifests import (
    DEPLOY,
    ROOT,
    Document,
    containers,
    documents,
    health_checks,
    pod_templates,
    tq_commands,
)
from tests.documents import flags_of

VERSIONS = ("1.31.0", "1.37.0")
"""Of Kubernetes: the oldest whose sidecars and probes these manifests use without a switch that is still around, and
the newest known."""
KUBERNETES = [found for found in documents("kubernetes") if found[1]["kind"] != "Kustomization"]
KUBERAY = [found for found in documents("kuberay") if found[1]["kind"] != "Kustomization"]
KUSTOMIZATIONS = sorted(DEPLOY.glob("*/kustomization.yaml"))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
PODS = [(name, template) for name, document in KUBERNETES + KUBERAY for template in pod_templates(document)]
PODS_BY_FILE = {Path(name.partition(":")[0]).stem: template for name, template in PODS}
INGRESS = {
    document["metadata"]["name"]: document["spec"]["ingress"]
    for name, document in KUBERNETES
    if document["kind"] == "NetworkPolicy" and name.startswith("kubernetes/network.yaml")
}
COMPOSE: Document = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def named(parameters: list[tuple[str, Any]]) -> Any:
    return pytest.mark.parametrize(
        "given", [value for _, value in parameters], ids=[f"{n}-{name}" for n, (name, _) in enumerate(parameters)]
    )


def quantity(text: str) -> int:
    """Bytes from Kubernetes' "10Gi"."""
    return size(f"{text}B")


@pytest.mark.parametrize("version", VERSIONS)
@named(KUBERNETES)
def test_kubernetes_takes_it(given: Document, version: str) -> None:
    kubernetes_validate.validate(given, version, strict=True)


def test_the_schema_refuses_what_is_wrong() -> None:
    document = json.loads(json.dumps(KUBERNETES[1][1]))
    document["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["periodSeconds"] = "often"
    with pytest.raises(kubernetes_validate.ValidationError, match="'often' is not of type 'integer'"):
        kubernetes_validate.validate(document, VERSIONS[0], strict=True)


@named(KUBERAY)
def test_kuberay_takes_it(given: Document) -> None:
    schema = json.loads((Path(__file__).parent / "kuberay.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(given)
    for template in pod_templates(given):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
        kubernetes_validate.validate(pod, VERSIONS[0], strict=True)


@pytest.mark.integration
def test_compose_takes_it() -> None:
    done = subprocess.run(
        [
            Path(sys.executable).with_name("check-jsonschema"),
            "--builtin-schema=vendor.compose-spec",
            DEPLOY / "compose.yaml",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout


@named(list(tq_commands()))
def test_flags_of_commands_are_there(given: list[str]) -> None:
    verb, *words = given
    wrong = {word.partition("=")[0] for word in words if word.startswith("--")} - flags_of(verb)
    assert not wrong, f"tq {verb} has no {sorted(wrong)}"


def test_every_kind_of_command_was_looked_at() -> None:
    verbs = {where.split(":")[0].split("/")[-1] + " " + words[0] for where, words in tq_commands()}
    expected = {f"{place} {verb}" for place in ("compose.yaml", "tq.sbatch") for verb in ("serve", "unit")}
    expected |= {"controller.yaml serve", "units.yaml unit", "trainer.yaml unit", "per-node.yaml unit"}
    assert expected | {"Dockerfile serve"} == verbs


@named(PODS)
def test_volumes_that_are_mounted_are_there_and_each_other_way(given: Document) -> None:
    there = {volume["name"] for volume in given["spec"].get("volumes", [])}
    mounted = {mount["name"] for container in containers(given) for mount in container.get("volumeMounts", [])}
    claimed = {
        claim["metadata"]["name"]
        for _, document in KUBERNETES
        if document.get("spec", {}).get("template") is given
        for claim in document["spec"].get("volumeClaimTemplates", [])
    }
    assert mounted == there | claimed


@named(PODS)
def test_shared_memory_holds_the_capacity_and_counts_as_memory(given: Document) -> None:
    volumes = {volume["name"]: volume for volume in given["spec"].get("volumes", [])}
    shm = volumes.get("shm", {}).get("emptyDir")
    for container in containers(given):
        arguments = dict(word.split("=", 1) for word in container.get("args", []) if "=" in word)
        if "--capacity" not in arguments:
            continue
        capacity = size(arguments["--capacity"])
        limit = quantity(container["resources"]["limits"]["memory"])
        assert capacity < limit
        if shm is not None:
            assert capacity < quantity(shm["sizeLimit"]) < limit
            assert shm["medium"] == "Memory"


@named(PODS)
def test_nobody_is_root(given: Document) -> None:
    assert given["spec"]["securityContext"]["runAsNonRoot"] is True
    assert given["spec"]["securityContext"]["runAsUser"] == 1000
    assert given["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(given):
        assert container["image"] == f"rl-dataplane:{VERSION}"
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


@named(list(health_checks()))
def test_health_checks_ask_at_the_http_port_of_the_command(given: tuple[list[str], list[str]]) -> None:
    command, check = given
    (port,) = re.findall(r"--http-port[= ](\d+)", " ".join(command))
    assert check[-1] == f"http://127.0.0.1:{port}/healthz"


@named([(name, document) for name, document in KUBERNETES if document["kind"] == "StatefulSet"])
def test_ports_of_services_probes_and_commands_are_the_same(given: Document) -> None:
    (container,) = given["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    told = dict(word.split("=", 1) for word in container["args"] if "=" in word)
    first, http = int(told["--port"]), int(told["--http-port"])
    assert ports == {"http": http, "zmq": first}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        kinds = {name: kind for name, kind in container[probe].items() if isinstance(kind, dict)}
        assert kinds == {"httpGet": {"path": "/healthz", "port": "http"}}
    (service,) = [
        document
        for _, document in KUBERNETES
        if document["kind"] == "Service" and document["metadata"]["name"] == given["spec"]["serviceName"]
    ]
    labels = given["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    assert given["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_units_of_one_set_are_nobody_elses() -> None:
    """Selectors that overlap would have sets fight over pods."""
    selectors = [
        document["spec"]["selector"]["matchLabels"]
        for _, document in KUBERNETES
        if document["kind"] in ("StatefulSet", "DaemonSet")
    ]
    labels = [template["metadata"]["labels"] for _, template in PODS if "metadata" in template]
    for selector in selectors:
        assert len([found for found in labels if selector.items() <= found.items()]) == 1


def test_the_network_policy_opens_the_ports_that_are_used() -> None:
    policies = {name: {port["port"] for rule in rules for port in rule["ports"]} for name, rules in INGRESS.items()}
    services = {
        document["metadata"]["name"]: {port["port"] for port in document["spec"]["ports"]}
        for _, document in KUBERNETES
        if document["kind"] == "Service"
    }
    assert policies == services


def test_whoever_moves_rows_reaches_the_units() -> None:
    """Clients, and the pod in which the pages have `tq drain` run."""
    (rule,) = [rule for rule in INGRESS["tq-unit"] if {"protocol": "TCP", "port": 7043} in rule["ports"]]
    let_in = [found["podSelector"]["matchLabels"].items() for found in rule["from"]]
    for kind, template in (("client", PODS_BY_FILE["trainer"]), ("controller", PODS_BY_FILE["controller"])):
        assert any(wanted <= template["metadata"]["labels"].items() for wanted in let_in), kind


def test_trainers_that_are_units_may_talk_by_any_port() -> None:
    (policy,) = [document for name, document in KUBERNETES if name == "kubernetes/trainer.yaml:NetworkPolicy"]
    labels = PODS_BY_FILE["trainer"]["metadata"]["labels"].items()
    (rule,) = policy["spec"]["ingress"]
    assert "ports" not in rule
    for wanted in (policy["spec"]["podSelector"], rule["from"][0]["podSelector"]):
        assert wanted["matchLabels"].items() <= labels


def test_no_unit_ends_because_its_manifest_changed() -> None:
    units = [
        document
        for _, document in KUBERNETES
        if document["kind"] in ("StatefulSet", "DaemonSet") and document["metadata"]["name"] != "tq-controller"
    ]
    assert [unit["spec"]["updateStrategy"]["type"] for unit in units] == ["OnDelete", "OnDelete"]


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=[path.parent.name for path in KUSTOMIZATIONS])
def test_what_a_kustomization_names_is_there(path: Path) -> None:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name in found["resources"]:
        assert (path.parent / name).is_file()
    for generator in found.get("configMapGenerator", []):
        assert all((path.parent / name).is_file() for name in generator["files"])
    assert found["images"] == [{"name": "rl-dataplane", "newName": "rl-dataplane", "newTag": VERSION}]


def test_the_ray_job_runs_what_the_cluster_mounts() -> None:
    by_kind = {document["kind"]: document for _, document in KUBERAY}
    cluster, job = by_kind["RayCluster"], by_kind["RayJob"]
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    (head,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    (mount,) = [mount for mount in head["volumeMounts"] if mount["name"] == "job"]
    assert job["spec"]["entrypoint"] == f"python {mount['mountPath']}/job.py"
    ray = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("ray=="))
    assert cluster["spec"]["rayVersion"] == ray.removeprefix("ray==")
    capacity = int(yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["TQ_CAPACITY_BYTES"])
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group in groups:
        objects = int(group["rayStartParams"]["object-store-memory"])
        (shm,) = [volume for volume in group["template"]["spec"]["volumes"] if volume["name"] == "shm"]
        assert objects + capacity < quantity(shm["emptyDir"]["sizeLimit"])


def test_compose_names_files_volumes_and_secrets_that_are_there() -> None:
    for name, service in COMPOSE["services"].items():
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])
        assert set(service.get("depends_on", ())) <= set(COMPOSE["services"])
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], (
                f"{name}: {volume}"
            )


def test_compose_can_give_every_service_its_secrets() -> None:
    """Only secrets that are files can be given to containers with a root that is read only."""
    written = {name for name, secret in COMPOSE["secrets"].items() if "file" not in secret}
    for name, service in COMPOSE["services"].items():
        assert not (service.get("read_only") and written & set(service.get("secrets", ()))), name


def test_compose_publishes_to_this_machine_only() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_what_prometheus_asks_is_there_and_named_as_grafana_names_it() -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    asked = {target for job in scraped for found in job["static_configs"] for target in found["targets"]}
    served = {
        f"{name}:{word.partition('=')[2]}"
        for name, service in COMPOSE["services"].items()
        for word in service.get("command", ())
        if word.startswith("--http-port=")
    }
    assert asked == served
    assert {job["authorization"]["credentials_file"] for job in scraped} == {"/run/secrets/tq_token"}
    provisioned = (DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text(encoding="utf-8")
    (source,) = yaml.safe_load(provisioned)["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert COMPOSE["services"][host]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_compose_gives_units_more_shared_memory_than_capacity() -> None:
    def default(text: str) -> int:
        return size(text.partition(":-")[2].rstrip("}"))

    units = [service for name, service in COMPOSE["services"].items() if name.startswith("unit-")]
    assert len(units) == 2
    for unit in units:
        (capacity,) = [word.partition("=")[2] for word in unit["command"] if word.startswith("--capacity=")]
        assert default(capacity) < default(unit["shm_size"])


# --- deploy/prometheus and deploy/grafana: what they name is exported, and what Prometheus' own tool
# says of them.


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


# --- Linters look at the image file and at every script in deploy/, and the image file names what is
# in this tree.


DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
BINARIES = Path(sys.executable).parent
SCRIPTS = sorted(
    path
    for path in DEPLOY.rglob("*")
    if path.is_file() and path.read_bytes().startswith((b"#!/bin/sh", b"#!/usr/bin/env bash"))
)


def lint(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.integration
def test_the_image_file() -> None:
    lint([BINARIES / "hadolint", DOCKERFILE])


@pytest.mark.integration
def test_the_linter_of_image_files_refuses_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && sudo ls\n")
    with pytest.raises(AssertionError, match="DL3004"):
        lint([BINARIES / "hadolint", tmp_path / "Dockerfile"])


@pytest.mark.integration
@pytest.mark.parametrize("path", SCRIPTS, ids=[path.name for path in SCRIPTS])
def test_a_script(path: Path) -> None:
    lint([BINARIES / "shellcheck", path])


def test_there_are_scripts() -> None:
    assert [path.name for path in SCRIPTS] == ["tq.sbatch"]


def test_what_the_image_copies_is_let_through() -> None:
    """`.dockerignore` keeps everything out but what it names."""
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(encoding="utf-8"), re.M)
    names = {name for words in copied for name in words.split()}
    assert names == allowed
    assert all((ROOT / name).exists() for name in names)


def test_the_image_has_the_pinned_ray_and_torch() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    text = DOCKERFILE.read_text(encoding="utf-8")
    for name, package in (("ray", r'"ray\[default\]==([\d.]+)"'), ("torch", r"torch==([\d.]+)\n")):
        assert [f"{name}=={version}" for version in re.findall(package, text)] == [
            pin for pin in pins if pin.startswith(f"{name}==")
        ]


def test_nothing_is_pinned_twice() -> None:
    def pins(path: Path) -> dict[str, str]:
        found = (line.split("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line)
        return {name.lower().replace("_", "-"): version for name, version in found}

    added = pins(DEPLOY / "docker" / "constraints.txt")
    assert "aiohttp-cors" in added
    assert not set(added) & set(pins(ROOT / "constraints.txt"))
