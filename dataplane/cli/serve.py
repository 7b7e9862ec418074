"""`tq serve`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dataplane.cli.flags import Http, Json, MemoryFlags, Security
from dataplane.cli.formatting import duration
from dataplane.cli.output import print_json, print_notice
from dataplane.config import DataPlaneConfig
from dataplane.core.stopping import Stop
from dataplane.core.types import Checksums


def serve(
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65534, help="Port of the controller (default: any free one, printed).")
    ] = 0,
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
        _print_ready(controller.address, controller.http_url, json=json)
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


def _print_ready(address: str, url: str, json: bool) -> None:
    """Print where the service listens, as text or as JSON. url: that of its HTTP server, or "" without one."""
    if json:
        print_json({"address": address, "http": url or None})
    else:
        print(f"data plane service at {address}")
        if url:
            print(f"page at {url}/, metrics at {url}/metrics")
    sys.stdout.flush()
