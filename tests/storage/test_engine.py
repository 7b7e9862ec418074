"""Where there is no transfer engine, or it must not be used: the reasons that are given."""

import builtins
import importlib
import logging

import pytest

from dataplane.config import DataPlaneConfig
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.transport.mooncake import engine as engine_module
from dataplane.storage.transport.mooncake.engine import Engine, EngineError, EngineSettings
from dataplane.storage.transport.mooncake.engine_transport import EngineTransport, UnitEngine
from dataplane.storage.transport.zmq import ClientFrames

CONFIG = DataPlaneConfig(bulk_transport="mooncake", mooncake_host="test.invalid")
ENCRYPTED = {"encrypt_rows": True, "token": "t"}


@pytest.fixture(params=["no wheel", "no library"])
def absent(request, monkeypatch):
    """What the reason has to say."""
    honest = importlib.import_module

    def fail(name, *more):
        if name != "mooncake.engine":
            return honest(name, *more)
        if request.param == "no wheel":
            raise ModuleNotFoundError(name)
        raise builtins.ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(engine_module.importlib, "import_module", fail)
    return "pip install" if request.param == "no wheel" else "libibverbs"


def test_a_client_says_why_and_talks_zmq(absent, caplog):
    transport = EngineTransport(CONFIG)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            payloads = transport.payloads_for(pb.Memory(), "tcp://127.0.0.1:1", closing=lambda: False)
            assert isinstance(payloads, ClientFrames)
    assert absent in caplog.text
    assert caplog.text.count("Client falls back to ZMQ") == 1
    transport.close()


def test_a_unit_says_why_and_talks_zmq(absent, caplog):
    with caplog.at_level(logging.WARNING):
        assert UnitEngine.open(CONFIG) is None
    assert absent in caplog.text
    assert "Storage unit falls back to ZMQ" in caplog.text


def test_without_the_setting_nothing_is_loaded(absent, caplog):
    with caplog.at_level(logging.WARNING):
        assert UnitEngine.open(DataPlaneConfig()) is None
        transport = EngineTransport(DataPlaneConfig())
        payloads = transport.payloads_for(pb.Memory(), "tcp://127.0.0.1:1", closing=lambda: False)
    assert isinstance(payloads, ClientFrames)
    assert not caplog.text


@pytest.mark.parametrize(("found", "wanted"), [([], ""), (["mlx5_0"], "mlx5_1"), ([], "mlx5_0")])
def test_rdma_needs_its_devices(tmp_path, monkeypatch, found, wanted):
    for name in found:
        (tmp_path / name).touch()
    monkeypatch.setattr(engine_module, "RDMA_DEVICES", tmp_path)
    with pytest.raises(EngineError, match="this machine has the RDMA devices") as error:
        Engine(EngineSettings(host="127.0.0.1", protocol="rdma", device=wanted))
    assert wanted in str(error.value)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"bulk_transport": "pigeon"}, "zmq, mooncake"),
        ({"mooncake_protocol": "ib"}, "tcp, rdma"),
        ({"bulk_transport": "mooncake", **ENCRYPTED}, "does not encrypt"),
    ],
)
def test_settings_that_do_not_go(settings, why):
    with pytest.raises(ValueError, match=why):
        DataPlaneConfig(**settings)
