"""`tq checkpoint` and `tq restore`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import dataplane
from dataplane.cli.completion import partitions as names
from dataplane.cli.flags import Json, TargetFlags
from dataplane.cli.formatting import counted, readable, shown
from dataplane.cli.output import print_either
from dataplane.errors import PartitionExistsError

if TYPE_CHECKING:
    from dataplane import CheckpointInfo, DataPlaneClient

AddressAndPath = Annotated[
    list[str],
    typer.Argument(metavar="[ADDRESS] PATH", help="host:port of the controller, and the checkpoint's directory."),
]
Partitions = Annotated[
    list[str] | None,
    typer.Option(
        "--partition",
        metavar="NAME",
        help="Only this partition; may be repeated (default: all).",
        autocompletion=names,
    ),
]


def checkpoint(
    *, address_and_path: AddressAndPath, partition: Partitions = None, target: TargetFlags, json: Json = False
) -> int:
    """Save a consistent snapshot of partitions to a directory."""
    client, path = _connect("checkpoint", address_and_path, target)
    with client:
        info = client.checkpoint(path, partition or None)
    print_either(info, f"checkpoint of {summary(info)} at {info.path}", json=json)
    return 0


def restore(
    *,
    address_and_path: AddressAndPath,
    partition: Partitions = None,
    replace: Annotated[
        bool, typer.Option("--replace", metavar="", help="Drop existing partitions of the same names.")
    ] = False,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Restore the partitions of a checkpoint, all or none."""
    client, path = _connect("restore", address_and_path, target)
    with client:
        try:
            info = client.restore(path, partition or None, replace=replace)
        except PartitionExistsError as error:
            raise ValueError(
                f"partition {error.partition!r} exists already; clear it (`tq clear`), restore only others "
                "(--partition), or replace it (--replace)"
            ) from error
    print_either(info, f"restored {summary(info)} from {info.path}", json=json)
    return 0


def summary(info: CheckpointInfo) -> str:
    """Summarize the saved or restored partitions in one line."""
    names = ", ".join(f"{shown(name)} ({counted(count, 'sample')})" for name, count in info.partitions.items())
    return f"{names or 'no partitions'}, {readable(info.nbytes)} in {counted(info.files, 'file')}"


def _connect(name: str, address_and_path: list[str], target: TargetFlags) -> tuple[DataPlaneClient, str]:
    """Connect a client for the command `name`. Return it and the path of the checkpoint. address_and_path: the
    positional arguments, [ADDRESS] PATH."""
    if len(address_and_path) > 2:
        raise typer.BadParameter(
            f"got {len(address_and_path)} arguments, expected an optional address and a path", param_hint="PATH"
        )
    config = target.config(name, address_and_path[0] if len(address_and_path) == 2 else None)
    return dataplane.DataPlaneClient(config).connect(), address_and_path[-1]
