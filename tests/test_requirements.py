"""Our requirements can be installed beside what frameworks pin; their versions are those that are read off there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests import floors

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OURS = {each.name: each.specifier for each in map(Requirement, PROJECT["dependencies"])}
PINS = {
    "verl 0.9.1 with vLLM 0.24.0 or SGLang 0.5.12": {
        "torch": ("==2.11.0", "2.11.0"),
        "tensordict": (">=0.8.0,<=0.10.0,!=0.9.0", "0.10.0"),
        "ray": (">=2.41.0", "2.47.0"),
        "numpy": (">=2.0.0", "2.0.0"),
        "protobuf": (">=5.29.6,!=6.30.*,!=6.31.*,!=6.32.*", "6.33.5"),
        "prometheus-client": (">=0.20.0", "0.20.0"),
        "pyzmq": (">=25.1.2", "27.1.0"),
        "safetensors": (">=0.6.2", "0.6.2"),
    },
    "NeMo-RL": {"torch": ("==2.11.0", "2.11.0"), "ray": (">=2.55.1", "2.56.1"), "protobuf": (">=6.33.5", "7.35.1")},
    "RLinf": {"torch": ("==2.11.0", "2.11.0"), "ray": (">=2.47.0", "2.47.0"), "numpy": ("==2.2", "2.2")},
}
"""Per framework and package: what it allows, and a version that it allows and that we must."""


@pytest.mark.parametrize("framework", PINS)
def test_a_framework_s_pins_are_admitted(framework: str) -> None:
    for name, (allowed, version) in PINS[framework].items():
        both = SpecifierSet(allowed) & OURS[name]
        assert version in both, f"{framework} and we leave no {name} {version}: {both}"


def test_every_requirement_has_a_floor_that_it_admits() -> None:
    found = floors.floors()
    assert set(OURS) <= set(found)
    for name, specifier in OURS.items():
        assert found[name] in specifier


def test_the_classifiers_name_the_versions_of_python_that_tests_run_on() -> None:
    (others,) = re.findall(r"^PYTHONS \?= (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    tested = {"3.11", *(version.rpartition(".")[0] for version in others.split())}
    language = "Programming Language :: Python :: "
    named = {each.removeprefix(language) for each in PROJECT["classifiers"] if each.startswith(f"{language}3.")}
    assert named == tested
