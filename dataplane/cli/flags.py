"""Groups of flags that several commands share: a command has a parameter whose type is the group."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal

import typer

from dataplane.cli.output import size
from dataplane.config import ENV_ADDRESS, ENV_TOKEN, DataPlaneConfig

_security = functools.partial(typer.Option, rich_help_panel="Security")
_memory = functools.partial(typer.Option, rich_help_panel="Memory and state")
_transport = functools.partial(typer.Option, rich_help_panel="Transport of rows")
_http = functools.partial(typer.Option, rich_help_panel="Page and metrics")

Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON, for scripts.")]
Address = Annotated[
    str | None, typer.Argument(metavar="[ADDRESS]", help=f"host:port of the controller (default: {ENV_ADDRESS}).")
]


@dataclass(frozen=True, kw_only=True)
class Security:
    """Credentials of this process."""

    token_file: Annotated[
        str | None,
        _security(metavar="FILE", help=f"File with the service's token (default: {ENV_TOKEN})."),
    ] = None
    tls_cert_file: Annotated[
        str | None,
        _security("--tls-cert", metavar="FILE", help="TLS of page, metrics and gRPC: PEM file of the certificate."),
    ] = None
    tls_key_file: Annotated[str | None, _security("--tls-key", metavar="FILE", help="PEM file of its key.")] = None
    tls_ca_file: Annotated[
        str | None,
        _security("--tls-ca", metavar="FILE", help="PEM file of the authority that signed the peers' certificates."),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return the flags as keyword arguments of `DataPlaneConfig`."""
        return {flag.name: getattr(self, flag.name) for flag in fields(Security)}


@dataclass(frozen=True, kw_only=True)
class TargetFlags(Security):
    """Address of the service, and credentials for it."""

    at: Annotated[
        str | None,
        typer.Option(
            "--address", "-a", metavar="ADDRESS", help=f"host:port of the controller (default: {ENV_ADDRESS})."
        ),
    ] = None

    def config(self, name: str, address: str | None = None) -> DataPlaneConfig:
        """Return the settings of a client called "tq NAME". address: the positional argument, instead of --address.
        Raises `BadParameter` if both are given, or neither of them nor TQ_ADDRESS."""
        config = self.config_if_any(name, address)
        if not config.address:
            raise typer.BadParameter(
                f"the address is missing: pass the host:port that `tq serve` printed, or set {ENV_ADDRESS}",
                param_hint="--address",
            )
        return config

    def config_if_any(self, name: str, address: str | None = None) -> DataPlaneConfig:
        """Like `config`, but if no address is given, that of the settings is None."""
        if address is not None and self.at is not None:
            raise typer.BadParameter(f"got {self.at} and {address}; pass only one address", param_hint="--address")
        return DataPlaneConfig(
            address=address or self.at, client_name=f"tq {name}", **self.settings()
        ).with_environment()


@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """Settings of controllers and storage units."""

    host: Annotated[
        str,
        _security(metavar="HOST", help="Address to listen on; all but loopback addresses need a token."),
    ] = "127.0.0.1"
    insecure: Annotated[
        bool,
        _security("--insecure", metavar="", help="Allow to listen beyond loopback without a token."),
    ] = False
    encrypt_rows: Annotated[
        bool,
        _security("--encrypt-rows", metavar="", help="Encrypt the rows that units send over TCP; requires a token."),
    ] = False
    capacity: Annotated[
        int | None,
        _memory(parser=size, metavar="SIZE", help="Bytes per unit, e.g. 512m (default: a share of --arena-dir)."),
    ] = None
    arena_dir: Annotated[str, _memory(metavar="DIR", help="Local directory for arenas.")] = "/dev/shm"
    state_dir: Annotated[
        str | None,
        _memory(metavar="DIR", help="Local directory of the state that a restarted service restores."),
    ] = None

    bulk_transport: Annotated[
        Literal["zmq", "mooncake"],
        _transport(
            help="How rows are sent between hosts; mooncake: by transfer engine, for clients that use it too (extra "
            "mooncake). It has neither encryption nor authentication."
        ),
    ] = "zmq"
    mooncake_protocol: Annotated[Literal["tcp", "rdma"], _transport(help="Protocol of the transfer engine.")] = "tcp"
    mooncake_device: Annotated[
        str, _transport(metavar="NAMES", help="RDMA devices, comma-separated (default: any).")
    ] = ""
    mooncake_host: Annotated[
        str | None,
        _transport(metavar="HOST", help="Host of the transfer engine as clients reach it (default: --host)."),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return the flags as keyword arguments of `DataPlaneConfig`."""
        settings = asdict(self)
        settings["capacity_bytes"] = settings.pop("capacity")
        return settings


@dataclass(frozen=True, kw_only=True)
class Http:
    """Settings of the HTTP server for browsers and Prometheus."""

    ui: Annotated[
        bool,
        _http("--ui", metavar="", help="Serve the dashboard page."),
    ] = False
    metrics: Annotated[
        bool,
        _http("--metrics", metavar="", help="Serve Prometheus metrics at /metrics (the same server as the page)."),
    ] = False
    http_port: Annotated[
        int | None,
        _http(
            min=0,
            max=65535,
            metavar="PORT",
            help="Port for both (default: one above --port, or any free one, printed). Storage units serve "
            "Prometheus metrics at the next ports.",
        ),
    ] = None

    def port(self, port: int) -> int | None:
        """Return the HTTP port of a service at `port`; None if HTTP is disabled, 0 for any free port."""
        if self.http_port is not None:
            return self.http_port
        if not (self.ui or self.metrics):
            return None
        return port + 1 if port else 0


def typer_command(run: Callable[..., int]) -> Callable[..., int]:
    """Convert `run` to a typer command: each parameter whose type is a group of flags is replaced by these flags. The
    docstring becomes the help, with one line per paragraph, which the terminal wraps."""
    hints = typing.get_type_hints(run, include_extras=True)
    dataclasses_of: dict[str, Any] = {}  # name of the parameter -> dataclass of its flags
    flags: list[tuple[str, Any, Any]] = []  # name, type and default of each
    for parameter in inspect.signature(run).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            dataclasses_of[parameter.name] = kind
            types = typing.get_type_hints(kind, include_extras=True)
            flags += [(flag.name, types[flag.name], flag.default) for flag in fields(kind)]
        else:  # a flag or argument of its own
            flags.append((parameter.name, kind, parameter.default))

    @functools.wraps(run)
    def command(**values: Any) -> int:
        """Call `run` with each group of flags as one object."""
        for name, kind in dataclasses_of.items():
            values[name] = kind(**{flag.name: values.pop(flag.name) for flag in fields(kind)})
        return run(**values)

    paragraphs = (inspect.getdoc(run) or "").split("\n\n")
    command.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    # Typer reads the flags from the signature and the annotations.
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for name, kind, default in flags
        ]
    )
    command.__annotations__ = {name: kind for name, kind, _ in flags}
    return command
