"""`tq bench`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from dataplane.cli.bench_runner import Measure, measure
from dataplane.cli.flags import Address, Json, TargetFlags
from dataplane.cli.local_service import temporary_service
from dataplane.cli.output import print_json, print_table
from dataplane.config import MIB, DataPlaneConfig

_CAPACITY_BYTES = 128 * MIB
"""Capacity of the temporary service."""
_PUT_S = 10.0
"""Time limit of a put that waits for space."""
_QUICK_S, _LONG_S = 0.3, 3.0
"""Time for each operation, with and without --quick."""


def bench(
    *,
    address: Address = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds instead of half a minute.")] = False,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Measure puts, gets and claims from here: on the service at an address, or on a temporary local service.

    One client makes one call at a time, in a separate partition that is dropped afterwards; needs 64 MiB of space.
    The results are rough; other load on this machine affects them.
    """
    with _target_service(target.config_if_any("bench", address)) as config:
        measures = list(measure(config, _QUICK_S if quick else _LONG_S))
    if json:
        print_json({"cpus": os.cpu_count(), "measures": [_as_dict(result) for result in measures]})
    else:
        columns = ("what", ">times", ">median ms", ">99% ms", ">MB/s", ">samples/s")
        print_table(columns, [_row(result) for result in measures])
    return 0


@contextlib.contextmanager
def _target_service(config: DataPlaneConfig) -> Iterator[DataPlaneConfig]:
    """Yield the settings for the service at the address, or for a temporary local service."""
    config = replace(config, put_timeout_s=_PUT_S)
    if config.address is not None:
        yield config
        return
    with temporary_service(capacity_bytes=_CAPACITY_BYTES) as address:  # does not need the credentials of `config`
        yield DataPlaneConfig(address=address, client_name=config.client_name, put_timeout_s=_PUT_S)


def _row(result: Measure) -> tuple[object, ...]:
    """Return the result as a row of the printed table."""
    mb_per_s = f"{result.mb_per_s:,.0f}" if result.nbytes else "-"
    samples_per_s = f"{result.samples_per_s:,.0f}" if result.samples else "-"
    return result.what, result.count, f"{result.median_ms:.3f}", f"{result.p99_ms:.3f}", mb_per_s, samples_per_s


def _as_dict(result: Measure) -> dict[str, Any]:
    return {**asdict(result), "mb_per_s": result.mb_per_s, "samples_per_s": result.samples_per_s}
