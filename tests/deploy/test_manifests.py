"""The manifests of deploy/ are what Kubernetes, KubeRay and compose take, and name what there is.

No cluster is here: schemas stand in for the first, and what they do not know is compared with this project.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from dataplane.cli.output import size
from tests.deploy.manifests import DEPLOY, ROOT, Document, containers, documents, pod_templates, tq_commands
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
    document["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["grpc"]["port"] = "grpc"
    with pytest.raises(kubernetes_validate.ValidationError, match="'grpc' is not of type 'integer'"):
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
    assert expected | {"Dockerfile serve", "Dockerfile status", "compose.yaml status"} == verbs


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


@named([(name, document) for name, document in KUBERNETES if document["kind"] == "StatefulSet"])
def test_ports_of_services_probes_and_commands_are_the_same(given: Document) -> None:
    (container,) = given["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    told = dict(word.split("=", 1) for word in container["args"] if "=" in word)
    first, http = int(told["--port"]), int(told["--http-port"])
    is_unit = container["args"][0] == "unit"
    assert ports == {"http": http} | ({"zmq": first} if is_unit else {"grpc": first, "zmq": first + 1})
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        kinds = {name: kind for name, kind in container[probe].items() if isinstance(kind, dict)}
        assert kinds == ({"httpGet": {"path": "/healthz", "port": "http"}} if is_unit else {"grpc": {"port": first}})
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
