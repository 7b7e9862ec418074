"""Settings refuse what cannot be, and name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane import DataPlaneConfig, build_data_plane_client, connect, serve
from dataplane.config import MIB, PATHS, TlsFiles


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity_bytes": 10},
        {"units": -1},
        {"checksums": "sometimes"},
        {"result_memory_bytes": -1},
        {"copy_threads": 0},
        {"reserve_fraction": 1.0},
        {"heartbeat_s": 0},
        {"port": -1},
        {"grpc_port": 65536},
        {"port": 70000},
        {"call_timeout_s": float("nan")},
        {"call_timeout_s": float("inf")},
        {"put_timeout_s": float("nan")},
        {"adress": "x:1"},
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        DataPlaneConfig.of(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"address": 5},
        {"address": b"here:1"},
        {"port": "7000"},
        {"capacity_bytes": 1e9},
        {"heartbeat_s": "2"},
        {"force_remote": "yes"},
        {"units": None},
    ],
)
def test_settings_of_another_type_are_named(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(TypeError, match=f"{name}=.*expected .*, got {type(value).__name__}"):
        DataPlaneConfig.of(settings)


def test_numbers_and_paths_of_other_libraries_are_taken() -> None:
    config = DataPlaneConfig(port=np.int64(7000), heartbeat_s=1, put_timeout_s=np.float32(2), state_dir=Path("/x"))  # type: ignore[arg-type]
    assert config.port == 7000


@pytest.mark.parametrize("address", [5, b"here:1", ["here:1"]])
def test_an_address_is_text(address: Any) -> None:
    with pytest.raises(TypeError, match="address="):
        connect(address)


@pytest.mark.parametrize("config", [5, "here:1", ["address"]])
def test_a_config_is_a_mapping(config: Any) -> None:
    with pytest.raises(TypeError, match="a DataPlaneConfig or a mapping"):
        serve(config)


def test_the_environment_fills_gaps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_ADDRESS", "there:1")
    monkeypatch.setenv("TQ_TOKEN", "secret")
    filled = DataPlaneConfig().with_environment()
    assert (filled.address, filled.secret()) == ("there:1", "secret")
    assert DataPlaneConfig(address="here:2").with_environment().address == "here:2"


@pytest.mark.parametrize("given", ["tls_cert_file", "tls_key_file"])
def test_certificate_and_key_are_given_together(given: str) -> None:
    with pytest.raises(ValueError, match="TLS requires both tls_cert_file and tls_key_file"):
        DataPlaneConfig.of({given: "x.pem"})


def test_an_authority_of_clients_needs_a_certificate_of_the_server() -> None:
    with pytest.raises(ValueError, match="tls_ca_file requires tls_cert_file and tls_key_file"):
        _ = DataPlaneConfig(tls_ca_file="x.pem").tls


def test_rows_are_encrypted_with_a_token_only() -> None:
    DataPlaneConfig(encrypt_rows=True, token="t").check_server()
    with pytest.raises(ValueError, match="encrypt_rows requires a token"):
        DataPlaneConfig(encrypt_rows=True).check_server()


def test_tls_files_come_all_from_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.setenv(f"TQ_TLS_{name}_FILE", f"env-{name}")
    tls = DataPlaneConfig().with_environment().tls
    assert tls == TlsFiles(cert_file="env-CERT", key_file="env-KEY", ca_file="env-CA")
    own = DataPlaneConfig(tls_cert_file="a", tls_key_file="b")
    assert own.with_environment().tls == TlsFiles(cert_file="a", key_file="b")


def test_a_token_of_another_type_is_not_shown() -> None:
    with pytest.raises(TypeError, match=r"^token: expected str") as caught:
        DataPlaneConfig.of({"token": b"secret"})
    assert "secret" not in str(caught.value)


def test_token_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_TOKEN", "other")
    path = tmp_path / "token"
    path.write_text("secret\n")
    assert DataPlaneConfig(token_file=str(path)).with_environment().secret() == "secret"
    path.write_text("\n")
    with pytest.raises(ValueError, match="empty"):
        DataPlaneConfig(token_file=str(path)).secret()


@pytest.mark.parametrize(("token", "why"), [("", "empty"), ("s\xe9cret", "ASCII"), ("a\nb", "ASCII"), (" x", "space")])
def test_a_token_that_guards_nothing_or_cannot_be_shown_is_refused(token: str, why: str) -> None:
    config = DataPlaneConfig(host="0.0.0.0", token=token, units=0, capacity_bytes=MIB)
    with pytest.raises(ValueError, match=f"token.*{why}") as caught:
        serve(config)
    assert not token or token not in str(caught.value)


def test_attaching_needs_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    with pytest.raises(ValueError, match="address"):
        build_data_plane_client({}, bootstrap=False)
    with pytest.raises(ValueError, match="address"):
        connect()


@pytest.mark.parametrize("name", PATHS)
def test_an_empty_path_is_not_the_current_directory(name: str) -> None:
    with pytest.raises(ValueError, match=f'{name}="": the path is empty'):
        DataPlaneConfig(**{name: ""})


def test_a_session_timeout_below_the_heartbeat_is_refused() -> None:
    with pytest.raises(ValueError, match=r"session_timeout_s=1\.0 is less than heartbeat_s=2\.0"):
        serve({"units": 0, "session_timeout_s": 1.0})
