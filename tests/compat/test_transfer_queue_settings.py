"""Settings and modules of the adapter: what is there under which name, and what is done with what is told."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import dataplane.compat.transfer_queue as tq
from dataplane import DataPlaneConfig, connect, serve
from dataplane.compat.switch import Replacement
from dataplane.compat.transfer_queue.settings import Settings, defaults, warn_once
from dataplane.errors import InvalidRequestError, UnsupportedValueError

SMALL = {"capacity_bytes": 32 << 20}


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TQ_ADDRESS", "TQ_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield
    tq.close()


def test_the_file_of_settings_has_the_defaults() -> None:
    omega = pytest.importorskip("omegaconf").OmegaConf
    with resources.as_file(resources.files("dataplane.compat.transfer_queue") / "config.yaml") as path:
        conf = omega.load(path)
    assert omega.to_container(conf) == defaults()
    assert Settings.of(conf) == Settings.of(None)


def test_all_settings_of_the_package_are_there() -> None:
    package = importlib.util.find_spec("transfer_queue")  # which is not imported: it imports ray
    if package is None or package.origin is None:
        pytest.skip("the package TransferQueue is not installed: make setup installs it")
    omega = pytest.importorskip("omegaconf").OmegaConf
    theirs = omega.to_container(omega.load(Path(package.origin).with_name("config.yaml")))
    ours = defaults()
    assert theirs.keys() <= ours.keys()
    for section, settings in theirs.items():
        assert {name: ours[section][name] for name in settings} == settings


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("client", ["TransferQueueClient", "AsyncTransferQueueClient"]),
        ("dataloader", ["StreamingDataLoader", "StreamingDataset"]),
        ("dataloader.streaming_dataloader", ["StreamingDataLoader"]),
        ("dataloader.streaming_dataset", ["StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]),
        ("interface", ["kv_put", "kv_batch_get"]),
        ("metadata", ["BatchMeta", "KVBatchMeta", "extract_field_schema"]),
        ("sampler", ["BaseSampler", "SequentialSampler", "GRPOGroupNSampler", "RankAwareSampler"]),
        ("sampler.base", ["BaseSampler"]),
        ("sampler.grpo_group_n_sampler", ["GRPOGroupNSampler"]),
        ("sampler.rank_aware_sampler", ["RankAwareSampler"]),
        ("sampler.seqlen_balanced_sampler", ["SeqlenBalancedSampler"]),
        ("sampler.sequential_sampler", ["SequentialSampler"]),
        ("utils.enum_utils", ["ExplicitEnum", "ProductionStatus", "Role"]),
        ("utils.logging_utils", ["get_logger"]),
    ],
)
def test_modules_are_there_under_the_names_of_the_package(module: str, names: list[str]) -> None:
    ours = importlib.import_module(f"dataplane.compat.transfer_queue.{module}")
    for name in names:
        assert getattr(ours, name) is getattr(tq, name, getattr(ours, name))


def test_helpers_of_the_package() -> None:
    enums = importlib.import_module("dataplane.compat.transfer_queue.utils.enum_utils")
    assert enums.Role("TransferQueueClient") is enums.Role.CLIENT
    with pytest.raises(ValueError, match="'nobody': expected one of"):
        enums.Role("nobody")
    logs = importlib.import_module("dataplane.compat.transfer_queue.utils.logging_utils")
    logger = logs.get_logger("tests.compat.some", "INFO")
    assert logger is logging.getLogger("tests.compat.some")
    assert logger.level == logging.INFO


@pytest.mark.parametrize("dataplane", [DataPlaneConfig(http_port=7), {"http_port": 7}])
def test_settings_of_the_service_are_a_mapping_or_a_config(dataplane: Any) -> None:
    assert Settings.of({"dataplane": dataplane}).service().http_port == 7
    assert Settings.of({"dataplane": None}).service() == DataPlaneConfig()


def test_a_setting_that_is_not_used_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    backend = {
        "SimpleStorage": {"total_storage_size": 7, "num_data_storage_units": 2, "zmq_info": {"a": 1}},
        "MooncakeStore": {"protocol": "rdma", "offload": {"enabled": True}, "hard_pin": None},
    }
    for _ in range(2):  # those of the backend that is chosen: frameworks fill in the others, too
        Settings.of({"backend": backend})
        Settings.of({"backend": {"storage_backend": "MooncakeStore", **backend}})
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition("=")[0] for text in said] == [
        "backend.SimpleStorage.total_storage_size",
        "backend.storage_backend",
        "backend.MooncakeStore.protocol",
        "backend.MooncakeStore.offload.enabled",
    ]
    assert "dataplane.capacity_bytes" in said[0]
    assert "dataplane.mooncake_protocol" in said[2]


def test_an_unknown_section_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """As is an unknown setting of `controller` and of `metrics`. The package ignores them."""
    warn_once.cache_clear()
    unknown = {"contoller": {"polling_mode": True}, "enable": True, "none": None}
    known = {"controller": {"samplr": "x", "sampler": "SequentialSampler"}, "metrics": {"prt": 1}}
    for _ in range(2):
        Settings.of({**unknown, **known})
    assert [text.partition(" is not used: ")[0] for text in caplog.messages] == [
        "contoller",
        "enable",
        "none",
        "controller.samplr",
        "metrics.prt",
    ]
    assert "unknown section; expected one of metrics, controller, backend" in caplog.text
    assert "unknown setting; expected one of controller.sampler," in caplog.text


def test_the_settings_of_an_earlier_init_are_known(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    settings = Settings.of(None)
    settings.metrics.endpoint = "there:1"
    Settings.of(settings)
    assert not caplog.messages


# --- with a service


@pytest.mark.integration
def test_metrics_are_open_where_nobody_set_a_token() -> None:
    settings = Settings.of({"metrics": {"enabled": True}, "dataplane": SMALL})
    assert settings.service().open_metrics
    assert not Settings.of({"metrics": {"enabled": True}, "dataplane": {"token": "t"}}).service().open_metrics
    assert not Settings.of({"dataplane": SMALL}).service().open_metrics
    with serve({**SMALL, "http_port": 0, "token": "secret", "open_metrics": True}) as server:
        place = f"http://{server.http_address}"
        with urlopen(f"{place}/metrics", timeout=60) as answer:
            assert b"# TYPE" in answer.read()
        for refused in (
            Request(f"{place}/api/service"),
            Request(f"{place}/metrics/"),
            Request(f"{place}/metrics", data=b"x", method="POST"),
            Request(f"{place}/metrics", method="DELETE"),
        ):
            with pytest.raises(HTTPError) as caught:
                urlopen(refused, timeout=60)
            assert caught.value.code in (401, 501)
            caught.value.close()
    with serve({**SMALL, "http_port": 0, "token": "secret"}) as server:
        with pytest.raises(HTTPError, match="401") as caught:
            urlopen(f"http://{server.http_address}/metrics", timeout=60)
        caught.value.close()


@dataclass
class Turn:
    """What no column carries."""

    text: str


@pytest.mark.integration
def test_objects_of_any_kind_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tq.init({"objects": "pickle", "dataplane": SMALL})
    rows = [Turn("one"), {"a": Turn("two")}]
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"turns": NonTensorStack(*rows)}, batch_size=2))
    tq.kv_put("c", "p", {"x": torch.ones(2)})
    tq.kv_put("d", "p", {"x": Turn("three")})
    assert list(tq.kv_batch_get(["a", "b"], "p")["turns"]) == rows
    both: Any = tq.kv_batch_get(["c", "d"], "p")["x"]
    assert list(both)[1] == Turn("three")
    tq.kv_put("e", "p", {"text": "half a pair \ud800"})
    assert list(tq.kv_batch_get("e", "p", "text")["text"]) == ["half a pair \ud800"]
    config = tq.get_client().config
    assert config.token
    with connect(config.address or "", token=config.token) as plain:
        with pytest.raises(UnsupportedValueError, match="objects='pickle'"):
            plain.get_samples(["a"], "p", ["turns"])
        with pytest.raises(UnsupportedValueError, match=r"row 0.*objects='pickle'"):
            plain.put_samples(["e"], "p", {"turns": [Turn("four")]})
    found = tq.TransferQueueClient("of the environment", config.address)
    try:
        assert found.get_partition_list() == ["p"]
    finally:
        found.close()


@pytest.mark.integration
def test_who_attaches_pickles_if_the_service_was_started_so() -> None:
    with serve({**SMALL, "token": "secret"}) as server:
        where = {"address": server.address, "token": "secret"}
        tq.init({"objects": "pickle", "dataplane": where})
        tq.kv_put("a", "p", {"turn": Turn("one")})
        tq.close()
        tq.init({"dataplane": where})
        assert list(tq.kv_batch_get("a", "p")["turn"]) == [Turn("one")]
        tq.close()


def test_a_switched_job_pickles_unless_it_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor where that would be refused."""
    warn_once.cache_clear()
    native, refusing = Settings.of(None), Settings.of({"objects": "refuse"})
    bare, secret = DataPlaneConfig(address="there:1"), DataPlaneConfig(address="there:1", token="secret")
    assert native.objects_with(None) == native.objects_with(secret) == "refuse"
    monkeypatch.setattr(sys, "meta_path", [Replacement("transfer_queue"), *sys.meta_path])
    assert native.objects_with(None) == native.objects_with(secret) == "pickle"
    assert refusing.objects_with(None) == native.objects_with(bare) == "refuse"
    (said,) = caplog.messages
    assert said.startswith("TQ_REPLACE is set, so objects that no column can store are pickled")
    monkeypatch.setenv("TQ_TOKEN", "secret")
    assert native.objects_with(bare) == "pickle"


@pytest.mark.integration
@pytest.mark.parametrize("token", ["", "mine"])
def test_a_session_takes_away_the_token_that_it_set_and_no_other(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("TQ_TOKEN", token)
    tq.init({"dataplane": SMALL | {"objects": "pickle"}})
    assert os.environ["TQ_TOKEN"] if not token else os.environ["TQ_TOKEN"] == token
    assert "TQ_ADDRESS" in os.environ
    tq.close()
    assert os.environ.get("TQ_TOKEN", "") == token
    assert "TQ_ADDRESS" not in os.environ


@pytest.mark.integration
def test_nothing_is_pickled_without_a_token_or_unasked() -> None:
    with serve(SMALL) as server, pytest.raises(InvalidRequestError, match="start the service with a token"):
        connect(server.address, objects="pickle").list_samples("p")
    with pytest.raises(ValueError, match="objects='yes': expected one of refuse, pickle"):
        Settings.of({"objects": "yes"}).service()
    tq.init({"dataplane": SMALL})
    with pytest.raises(TypeError, match=r"Turn.*objects='pickle'"):
        tq.kv_put("a", "p", {"turn": Turn("one")})
    image = pytest.importorskip("PIL.Image").new("RGB", (2, 2), (1, 2, 3))
    tq.kv_put("a", "p", {"image": image, "seen": {1, 2}, "order": OrderedDict([("b", 1), ("a", 2)])})
    back = tq.kv_batch_get("a", "p")
    assert back["seen"].tolist() == [{1, 2}]
    [order] = back["order"].tolist()
    assert type(order) is OrderedDict
    assert back["image"].tolist()[0].tobytes() == image.tobytes()
