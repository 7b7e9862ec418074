"""Options laid over each other, and what workers get of the driver's environment."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from workers.placement.environment import Layer, driver_environment, layered


def variables(**values: str) -> dict[str, Any]:
    return {"runtime_env": {"env_vars": values}}


def test_later_layers_win_and_say_why() -> None:
    layers = [
        Layer("the class", {"num_cpus": 1, "name": None, **variables(A="class", B="class", C="class")}, "never said"),
        Layer("the call", {"num_cpus": 1, "num_gpus": 0.5, "name": "x", **variables(B="call", D="call")}, "you asked"),
        Layer("configure_worker", {"num_gpus": 0, **variables(B="worker", C="worker", D="worker")}, "it has to"),
    ]
    before = copy.deepcopy(layers)
    options, overrides = layered(layers)
    assert options == {
        "num_cpus": 1,
        "num_gpus": 0,
        "name": "x",
        **variables(A="class", B="worker", C="worker", D="worker"),
    }
    assert overrides == [
        "the call overrides variable B of the class: you asked",
        "configure_worker overrides num_gpus=0.5 with 0, variable B, variable D of the call: it has to",
        "configure_worker overrides variable C of the class: it has to",
    ]
    options["runtime_env"]["env_vars"]["A"] = "changed"
    assert layers == before


def test_runtime_environments_are_merged_by_key() -> None:
    layers = [
        Layer("lower", {"runtime_env": {"pip": ["a"], "env_vars": {"A": "1"}}}, ""),
        Layer("upper", {"runtime_env": {"pip": ["b"], "config": {"eager_install": False}, "env_vars": None}}, "so"),
        Layer("top", {"runtime_env": None}, ""),
    ]
    options, overrides = layered(layers)
    assert options == {"runtime_env": {"pip": ["b"], "config": {"eager_install": False}, "env_vars": {"A": "1"}}}
    assert overrides == ["upper overrides pip=['a'] with ['b'] of lower: so"]


def test_values_of_variables_are_not_told() -> None:
    _, overrides = layered([Layer("a", variables(TOKEN="secret"), ""), Layer("b", variables(TOKEN="hidden"), "new")])
    assert overrides == ["b overrides variable TOKEN of a: new"]


@pytest.mark.parametrize(
    ("name", "value", "passed"),
    [
        ("A_SETTING", "anything", True),
        ("RAY_JOB_ID", "01000000", False),
        ("RAY_ADDRESS", "127.0.0.1:1", False),
        ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1", True),
        ("CUDA_VISIBLE_DEVICES", "7", False),
        ("HIP_VISIBLE_DEVICES", "7", False),
        ("A_PRICE", "5$HOME", False),
        ("A_BYTE", "\udcff", False),
    ],
)
def test_what_is_passed_on(monkeypatch: pytest.MonkeyPatch, name: str, value: str, passed: bool) -> None:
    monkeypatch.setenv(name, value)
    assert driver_environment().get(name) == (value if passed else None)
