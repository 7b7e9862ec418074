"""`tq serve` and `tq unit`: the commands that run a service."""

from __future__ import annotations

from typing import Annotated

import typer

from dataplane.cli.flags import Http, Json, MemoryFlags, Security
from dataplane.cli.output import duration, print_either, print_json, print_notice, shown
from dataplane.config import DataPlaneConfig
from dataplane.core.stopping import Stop
from dataplane.core.types import Checksums


def serve(
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the controller (default: any free one, printed).")
    ] = 0,
    grpc_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve a gRPC gateway for other languages (0: any free port, printed)."),
    ] = None,
    units: Annotated[int, typer.Option(min=0, help="Storage units to start.")] = 1,
    session_timeout: Annotated[
        float,
        typer.Option(
            parser=duration,
            metavar="SECONDS",
            help="Time without a heartbeat after which a client is lost if its lock cannot be checked (seconds).",
        ),
    ] = DataPlaneConfig.session_timeout_s,
    checksums: Annotated[
        Checksums, typer.Option(help="Which rows get a checksum that readers verify.")
    ] = Checksums.ACROSS_HOSTS,
    http: Http,
    memory: MemoryFlags,
    security: Security,
    json: Json = False,
) -> int:
    """Run a controller and its storage units until SIGTERM or SIGINT.

    The first line of output has the address: `data plane service at HOST:PORT`. Exit code 1 if the service fails.
    """
    config = DataPlaneConfig(
        port=port,
        grpc_port=grpc_port,
        http_port=http.port(port),
        session_timeout_s=session_timeout,
        checksums=checksums,
        **memory.settings(),
        **security.settings(),
    ).with_environment()
    return _run_service(config, units, json=json)


def _run_service(config: DataPlaneConfig, count: int, json: bool) -> int:
    """Run a controller in this process and each of `count` storage units in a child process. Return the exit code."""
    stop = Stop()  # before the slow imports: from here on, a signal stops the service
    from dataplane.controller.controller import Controller
    from dataplane.storage.unit_process import UnitProcesses, require_memory

    require_memory(count)
    controller = Controller(config).start()
    failures: list[str] = []

    def report_failure(why: str) -> None:
        """Stop the service because a storage unit failed. (`stop.asked` stays False: only a signal sets it.)"""
        failures.append(why)
        stop.set()

    units = UnitProcesses(controller.address, config, report_failure)
    # Called in a background thread when `stop` is set: a signal also ends a start of units that takes long.
    stop.then(units.stop)
    try:
        units.start(count)
        if stop.asked:  # a signal came during the start
            return 0
        if controller.recovered:
            print_notice(f"restored the state in {config.state_dir}")
        url = controller.http_url  # "" without HTTP
        text = f"data plane service at {controller.address}"
        if controller.grpc_address:
            text += f"\ngRPC gateway at {controller.grpc_address}"
        if url:
            text += f"\npage at {url}/, metrics at {url}/metrics"
        if json:
            addresses = {"grpc": controller.grpc_address or None, "http": url or None}
            print_json({"address": controller.address, **addresses})
        else:
            print(text, flush=True)
        stop.when(controller.ended)  # sets `stop` later; does not block
        stop.wait()  # for a signal, a failure of a unit, or the end of the controller
        if controller.ended.is_set():
            failures.append("the controller failed; see the log above")
        if failures and not stop.asked:  # after a signal, failures are part of stopping
            print_notice(f"tq: {failures[0]}; the service stops")
            return 1
    finally:
        units.stop()
        controller.stop()
    return 0


def unit(
    *,
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="host:port of the controller.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the unit in reports; needed with --state-dir.")
    ] = None,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port for clients on other hosts (default: any free one)."),
    ] = 0,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, metavar="PORT", help="Serve Prometheus metrics at this port (0: any free one, printed)."
        ),
    ] = None,
    reconnect: Annotated[
        float,
        typer.Option(
            parser=duration, metavar="SECONDS", help="How long to wait for a controller that is down (seconds)."
        ),
    ] = DataPlaneConfig.reconnect_s,
    memory: MemoryFlags,
    security: Security,
    json: Json = False,
) -> int:
    """Run an additional storage unit for a running controller, until SIGTERM or SIGINT.

    The first line of output has its name and says that it is ready. Exit code 1 if the controller stops first and does
    not restart in time.
    """
    config = DataPlaneConfig(
        port=port, http_port=http_port, reconnect_s=reconnect, **memory.settings(), **security.settings()
    ).with_environment()
    stop = Stop()  # before the slow imports: from here on, a signal stops the unit
    from dataplane.protocol.fd_limits import allow_more
    from dataplane.storage.unit import StorageUnit
    from dataplane.storage.unit_process import UnitStatus, run_unit

    def print_ready(status: UnitStatus) -> None:
        metrics = f", metrics at {status.http}/metrics" if status.http else ""
        facts = {"unit": status.unit, "http": status.http}
        print_either(facts, f"storage unit {shown(status.unit)} ready{metrics}", json=json)

    allow_more()  # open files
    storage_unit = StorageUnit(config, address, name=name)
    lost_controller = run_unit(storage_unit, stop, print_ready)
    if lost_controller:
        print_notice(f"tq: storage unit {storage_unit.name} lost its controller at {address}")
        return 1
    return 0
