"""What is in deploy/, as tests look at it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

Document = dict[str, Any]


def documents(*folders: str) -> list[tuple[str, Document]]:
    """Every YAML document in these folders of deploy/, with a name for it."""
    found = []
    for folder in folders:
        for path in sorted((DEPLOY / folder).glob("*.yaml")):
            for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
                found.append((f"{path.relative_to(DEPLOY)}:{document['kind']}", document))
    return found


def pod_templates(document: Document) -> Iterator[Document]:
    """The templates of the pods that it makes."""
    spec = document.get("spec", {})
    if "template" in spec:
        yield spec["template"]
    if "headGroupSpec" in spec:
        yield spec["headGroupSpec"]["template"]
        yield from (group["template"] for group in spec["workerGroupSpecs"])


def containers(template: Document) -> list[Document]:
    return [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]


def dockerfile(instruction: str) -> list[str]:
    """The words of the image's CMD or HEALTHCHECK."""
    lines = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    words: list[str] = yaml.safe_load(next(line for line in lines if line.startswith(instruction)).split("CMD")[1])
    return words


def health_checks() -> Iterator[tuple[str, tuple[list[str], list[str]]]]:
    """Each container outside Kubernetes: its command, and the words of its health check."""
    yield "Dockerfile", (dockerfile("CMD"), dockerfile("HEALTHCHECK"))
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    for name, service in compose["services"].items():
        if "healthcheck" in service:
            yield name, (service["command"], service["healthcheck"]["test"])


def tq_commands() -> Iterator[tuple[str, list[str]]]:
    """Every `tq` command line in deploy/: where it is, and its words after `tq`."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    for name, service in compose["services"].items():
        if "tq_token" in service.get("secrets", ()) and service["image"].startswith("${TQ_IMAGE"):
            yield f"compose.yaml:{name}", service["command"]
    for name, document in documents("kubernetes"):
        for template in pod_templates(document):
            for container in containers(template):
                if "command" not in container:
                    yield f"{name}:{container['name']}", container["args"]
    yield "Dockerfile:CMD", dockerfile("CMD")
    for number, line in enumerate((DEPLOY / "slurm" / "tq.sbatch").read_text(encoding="utf-8").splitlines(), 1):
        for words in re.findall(r"\btq (serve .*?|unit .*?)(?:\)|>|$)", line if "echo" not in line else ""):
            yield f"tq.sbatch:{number}", shlex.split(words.replace('"${unit[@]}"', ""))
