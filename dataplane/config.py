"""Settings of the service and its clients, and the environment variables that supply some of them."""

from __future__ import annotations

import functools
import numbers
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dataplane.core.types import Checksums

MIB = 1 << 20
LONGEST_S = 2_000_000.0
"""Maximum timeout in seconds (23 days): the longest timeout that a poll accepts."""
GIB = 1 << 30

PATHS = ("arena_dir", "state_dir", "token_file", "tls_cert_file", "tls_key_file", "tls_ca_file")
BULK_TRANSPORTS = ("zmq", "mooncake")
MOONCAKE_PROTOCOLS = ("tcp", "rdma")
OBJECTS = ("refuse", "pickle")

PUT_TIMEOUT_S = 60.0
"""How long a put waits for space if neither client nor service sets a timeout."""

ENV_ADDRESS = "TQ_ADDRESS"
ENV_TOKEN = "TQ_TOKEN"
ENV_TLS = {
    "tls_cert_file": "TQ_TLS_CERT_FILE",
    "tls_key_file": "TQ_TLS_KEY_FILE",
    "tls_ca_file": "TQ_TLS_CA_FILE",
}


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files of a server: its certificate with the key, and the authority whose certificates its clients must
    present; None: clients need no certificate."""

    cert_file: str
    key_file: str
    ca_file: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataPlaneConfig:
    """Settings of a service or a client. Durations are in seconds, sizes in bytes.

    address: address of the controller, "host:port" or "actor:NAME[@NAMESPACE]"; None for a service to be started.
    token: shared secret of the service, checked by every server. token_file: a file that contains the token.
    encrypt_rows: rows that a unit sends over TCP are encrypted; requires a token, which always encrypts commands.
    tls_cert_file, tls_key_file: PEM files of certificate and key with which the HTTP and gRPC servers use TLS.
        tls_ca_file: PEM file of the authority whose certificates clients of these servers must present; None: none.
    insecure: allow listening on non-loopback addresses without a token.
    host, port: listening address of the controller and its units (port 0: any free port). Without token or `insecure`,
        only loopback is allowed. Units that a service starts use any free port; `tq unit` uses `port`.
    grpc_port: port of the gRPC gateway, for clients in other languages (0: any free port; None: disabled).
    http_port: HTTP port of the controller on `host`, for browsers and Prometheus (0: any free port; None: disabled).
        The units that a service starts serve Prometheus on the ports that follow, or on any free port if 0.
        open_metrics: serve the controller's /metrics without a token. All other paths still require the token.
    capacity_bytes: size of each unit's arena; None takes a share of arena_dir that leaves space for Ray's object store.
    arena_dir: a local directory, /dev/shm by default. Arenas are created in a per-user subdirectory.
    units: number of storage units started with the controller.
    reserve_fraction: fraction of the capacity, and of every partition's budget, reserved for updates of existing rows.
    low_watermark, high_watermark: fractions of the space for new rows in a unit or a budget. At the high watermark the
        unit or budget becomes `pressed` in `stats()` and a warning is logged, until usage falls to the low watermark.
    heartbeat_s: interval of client heartbeats; a session uses the smaller of the service's and the client's value, and
        a longer one while more than 500 heartbeats per second would arrive from all sessions.
    session_timeout_s: silence after which a session is closed; with longer intervals, twice the interval later.
    call_timeout_s: timeout of commands that do not wait. connect_timeout_s: timeout for connecting.
    put_timeout_s: how long a put waits for space; `float("inf")`: without a limit. The value of a
        service applies to clients that set none (None: use the service's, 60 s by default).
    reconnect_s: how long clients of a service with a state_dir, and all storage units, wait for an unreachable service
        to return. Calls wait meanwhile, each up to its own deadline, and then raise `ServiceUnavailableError`.
    result_memory_bytes: memory of released results that each client keeps for its next reads.
    copy_threads: number of threads with which a client copies large columns to and from shared memory, including the
        calling thread (1: only the calling thread). None uses one per available core, up to four.
    state_dir: a local directory from which a restarted service recovers after any kind of exit; None: no recovery.
    checksums: rows that get a checksum from their writer, which readers compare (setting of a service). "across-hosts":
        all rows while clients and storage units are on several hosts, else rows sent over the network; readers that map
        the memory do not compare. "always": all rows. "never": no rows.
    bulk_transport: transport of rows between hosts: "zmq", or "mooncake" (Mooncake's transfer engine), used if client
        and unit both select it and have it installed. Mooncake has no encryption or authentication: docs/transports.md.
        mooncake_protocol: "tcp" or "rdma", with the devices in mooncake_device (comma-separated; "": any).
        mooncake_host: host name of this process's engine for its peers, if it differs from the outgoing address.
    objects: handling of objects that no column can hold (`dataplane.data.object_codec`). "refuse": raise an error.
        "pickle": the client pickles objects on put and unpickles them on get, so any client that puts can execute code
        in this process; requires a token, which keeps strangers out. The service itself unpickles nothing.
    force_remote: never use shared memory, even on the same host (for tests and measurements).
    client_name: name of the client in errors, logs and statistics; "" stands for "hostname:pid".
    """

    address: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_ca_file: str | None = None
    encrypt_rows: bool = False
    insecure: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    grpc_port: int | None = None
    http_port: int | None = None
    open_metrics: bool = False
    capacity_bytes: int | None = None
    arena_dir: str = "/dev/shm"
    units: int = 1
    reserve_fraction: float = 0.15
    low_watermark: float = 0.75
    high_watermark: float = 0.9
    heartbeat_s: float = 2.0
    session_timeout_s: float = 20.0
    call_timeout_s: float = 30.0
    connect_timeout_s: float = 10.0
    put_timeout_s: float | None = None
    reconnect_s: float = 60.0
    result_memory_bytes: int = 512 * MIB
    copy_threads: int | None = None
    state_dir: str | None = None
    checksums: str = Checksums.ACROSS_HOSTS
    bulk_transport: str = "zmq"
    mooncake_protocol: str = "tcp"
    mooncake_device: str = ""
    mooncake_host: str | None = None
    objects: str = "refuse"
    force_remote: bool = False
    client_name: str = ""

    def __post_init__(self) -> None:
        """Raise TypeError for a setting of the wrong type, ValueError for an invalid value or combination."""
        self._check_types()
        for name in PATHS:
            if getattr(self, name) == "":
                raise ValueError(f'{name}="": the path is empty (unset variable?); set a path or omit the setting')
        if self.capacity_bytes is not None and self.capacity_bytes < MIB:
            raise ValueError(f"capacity_bytes={self.capacity_bytes}: expected at least {MIB} bytes (1 MiB), or None")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port={self.port}: expected 0 to 65535")
        for name in ("grpc_port", "http_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port < 65536:
                raise ValueError(f"{name}={port}: expected 0 to 65535, or None")
        if self.checksums not in list(Checksums):
            raise ValueError(f"checksums={self.checksums!r}: expected one of {', '.join(Checksums)}")
        if self.objects not in OBJECTS:
            raise ValueError(f"objects={self.objects!r}: expected one of {', '.join(OBJECTS)}")
        if self.result_memory_bytes < 0:
            raise ValueError(f"result_memory_bytes={self.result_memory_bytes}: expected 0 or more")
        if self.copy_threads is not None and self.copy_threads < 1:
            raise ValueError(f"copy_threads={self.copy_threads}: expected 1 or more")
        self._check_transport()
        if self.units < 0:
            raise ValueError(f"units={self.units}: expected 0 or more")
        if not 0.0 <= self.reserve_fraction < 1.0:
            raise ValueError(f"reserve_fraction={self.reserve_fraction}: expected 0 or more, and less than 1")
        if not 0.0 <= self.low_watermark <= self.high_watermark <= 1.0 or not self.high_watermark:
            marks = f"low_watermark={self.low_watermark}, high_watermark={self.high_watermark}"
            raise ValueError(f"{marks}: must satisfy 0 <= low <= high <= 1 and high > 0")
        if not 0 <= self.reconnect_s <= LONGEST_S:
            raise ValueError(f"reconnect_s={self.reconnect_s}: must be 0 or more, and at most {LONGEST_S:,} s")
        for name in ("heartbeat_s", "session_timeout_s", "call_timeout_s", "connect_timeout_s"):
            duration_s = getattr(self, name)
            if not 0 < duration_s <= LONGEST_S:
                raise ValueError(f"{name}={duration_s}: must be positive, and at most {LONGEST_S:,} s")
        # This form also rejects NaN.
        if self.put_timeout_s is not None and not self.put_timeout_s > 0:
            expected = "must be positive, infinity for no timeout, or None for the service's"
            raise ValueError(f"put_timeout_s={self.put_timeout_s}: {expected}")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("TLS requires both tls_cert_file and tls_key_file; only one of them is set")

    def _check_types(self) -> None:
        """Raise TypeError for a setting of the wrong type."""
        for name, types in _accepted_types().items():
            value = getattr(self, name)
            # A bool is also an instance of Integral and Real, but not accepted as a number.
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                expected = " or ".join(each.__name__ for each in types if each is not type(None))
                shown = "" if name == "token" else f"={value!r}"
                raise TypeError(f"{name}{shown}: expected {expected}, got {type(value).__name__}")

    def _check_transport(self) -> None:
        """Raise ValueError for an unknown bulk transport, or one that the other settings exclude."""
        if self.bulk_transport not in BULK_TRANSPORTS:
            raise ValueError(f"bulk_transport={self.bulk_transport!r}: expected one of {', '.join(BULK_TRANSPORTS)}")
        if self.mooncake_protocol not in MOONCAKE_PROTOCOLS:
            expected = ", ".join(MOONCAKE_PROTOCOLS)
            raise ValueError(f"mooncake_protocol={self.mooncake_protocol!r}: expected one of {expected}")
        if self.bulk_transport == "mooncake" and self.encrypt_rows:
            raise ValueError(
                'bulk_transport="mooncake" with encrypt_rows: the transfer engine does not encrypt. Use '
                'bulk_transport="zmq", or do without encrypt_rows on a private network'
            )

    @classmethod
    def of(cls, config: DataPlaneConfig | Mapping[str, Any] | None) -> DataPlaneConfig:
        """Return `config` as a `DataPlaneConfig`. A mapping is converted; None gives the defaults. ValueError for
        unknown keys of a mapping, TypeError for other types."""
        if config is None:
            return cls()
        if isinstance(config, DataPlaneConfig):
            return config
        if not isinstance(config, Mapping):
            raise TypeError(f"config: expected a DataPlaneConfig or a mapping of settings, got {type(config).__name__}")
        known = {setting.name for setting in fields(cls)}
        unknown = sorted(set(config) - known)
        if unknown:
            raise ValueError(f"unknown data plane settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return cls(**config)

    def with_environment(self) -> DataPlaneConfig:
        """Return a copy in which unset address, token and TLS files come from TQ_ADDRESS, TQ_TOKEN and TQ_TLS_*. A
        token_file of the config also precedes TQ_TOKEN. TLS files come all from the config, or all from TQ_TLS_*."""
        variables = {} if any(getattr(self, name) for name in ENV_TLS) else ENV_TLS
        from_environment: dict[str, Any] = {
            name: os.environ[variable] for name, variable in variables.items() if os.environ.get(variable)
        }
        return replace(
            self,
            **from_environment,
            address=self.address or os.environ.get(ENV_ADDRESS) or None,
            token=self.token or (None if self.token_file else os.environ.get(ENV_TOKEN) or None),
        )

    @property
    def tls(self) -> TlsFiles | None:
        """Files with which the HTTP and gRPC servers use TLS; None: they do not. Raises ValueError if there is an
        authority for their clients, but no certificate."""
        if self.tls_cert_file and self.tls_key_file:
            return TlsFiles(cert_file=self.tls_cert_file, key_file=self.tls_key_file, ca_file=self.tls_ca_file)
        if self.tls_ca_file:
            raise ValueError("tls_ca_file requires tls_cert_file and tls_key_file in a server; set all three")
        return None

    def of_unit(self, index: int) -> DataPlaneConfig:
        """Return the config of storage unit `index` (from 0) of a service with this config."""
        http_port = self.http_port
        if http_port:  # not None (no HTTP server), and not 0 (any free port)
            http_port += 1 + index
        # `port` and `grpc_port` are the controller's: the unit uses any free one.
        return replace(self, port=0, grpc_port=None, http_port=http_port)

    def guarded(self) -> bool:
        """Whether a service may listen on a non-loopback address: it has a token, or sets `insecure`."""
        return self.insecure or self.secret() is not None

    def check_server(self) -> None:
        """Raise ValueError for settings that a controller or storage unit cannot have, or unusable TLS settings."""
        if self.encrypt_rows and self.secret() is None:
            raise ValueError("encrypt_rows requires a token (config.token, token_file, --token-file or TQ_TOKEN)")
        _ = self.tls

    @property
    def pickles(self) -> bool:
        """Whether a client with these settings pickles objects that no column can hold."""
        return self.objects == "pickle"

    def secret(self) -> str | None:
        """Return the token, read from token_file if only that is set; None without a token. Raises ValueError for an
        empty token, which would admit everybody, and for characters that HTTP and gRPC headers cannot hold."""
        source = "token"
        token = self.token
        if token is None and self.token_file is not None:
            source = f"token_file {self.token_file!r}"
            token = Path(self.token_file).read_text(encoding="utf-8").strip()
        if token is None:
            return None
        if not token:
            raise ValueError(f"{source} is empty: expected a token of printable ASCII characters")
        if not (token.isascii() and token.isprintable()) or token != token.strip():
            raise ValueError(f"{source} must consist of printable ASCII characters, without leading or trailing space")
        return token


@functools.cache
def _accepted_types() -> dict[str, tuple[type, ...]]:
    """Return the accepted types of each setting: those of its annotation, or wider ones."""
    wider: dict[type, tuple[type, ...]] = {
        int: (numbers.Integral,),
        float: (numbers.Real,),
        str: (str, os.PathLike),
    }
    accepted: dict[str, tuple[type, ...]] = {}
    for name, hint in typing.get_type_hints(DataPlaneConfig).items():
        members = typing.get_args(hint) or (hint,)  # the members of a union such as `str | None`
        accepted[name] = tuple(each for member in members for each in wider.get(member, (member,)))
    return accepted
