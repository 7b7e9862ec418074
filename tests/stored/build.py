"""`python -m tests.stored.build` writes what `test_stored` reads: the files of a service that was killed with a
checkpoint of it (`stored.tar.xz`), and the version numbers of their formats (`formats.json`).

Two runs differ in the random names of service, arena,
sessions and checkpoint, in times (generations of rows are counted from one), and in how often the journal has the time
and a heartbeat. All else that is read is the same: `test_stored` compares.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from unittest import mock

import msgspec

from dataplane.core import addresses

HERE = Path(__file__).parent
ARCHIVE = HERE / "stored.tar.xz"
FORMATS = HERE / "formats.json"
SETTINGS = {"capacity_bytes": 1 << 20, "session_timeout_s": 3600.0}
SERVICE_HOST, CLIENT_HOST = "the stored service's host", "its clients' host"


def build(archive: Path, formats: Path) -> None:
    """Write both files."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.stored.build", folder]
        ended = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
        if ended.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the service to be stored ended with code {ended.returncode}: {ended.stderr}")
        archive.write_bytes(lzma.compress(_packed(Path(folder)), preset=9))
    from dataplane import DataPlaneConfig  # noqa: PLC0415 (see `_serve`)
    from dataplane.storage.capacity import sweep_leftovers  # noqa: PLC0415
    from tests.stored.contents import current_formats  # noqa: PLC0415

    sweep_leftovers(DataPlaneConfig())  # the session locks of its clients
    formats.write_text(json.dumps(current_formats(), indent=2) + "\n")


def _packed(folder: Path) -> bytes:
    """A tar of its files, without those that every start makes anew, and without this user's name."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name not in ("lock", "journal.sqlite-shm"):
                where = path.relative_to(folder)
                entry = tarfile.TarInfo(f"arenas/{path.name}" if where.parts[0] == "arenas" else str(where))
                entry.size, entry.mode = path.stat().st_size, 0o600
                with path.open("rb") as file:
                    tar.addfile(entry, file)
    return packed.getvalue()


def _serve(folder: Path) -> None:
    """Fill a service whose files are in `folder`, and die. It is on a host that no test runs on, in a container that no
    test sees: nothing is imported before it has the names of these."""
    with mock.patch.object(addresses, "boot_id", return_value=SERVICE_HOST):
        from dataplane import connect, serve  # noqa: PLC0415
        from dataplane.client.rpc import handshake  # noqa: PLC0415
        from dataplane.controller.durable_ledger import make_image  # noqa: PLC0415
        from dataplane.controller.journal import Journal  # noqa: PLC0415
        from dataplane.storage import arena, client  # noqa: PLC0415
        from tests.stored.contents import PARTITIONS, fill, wait_in_image  # noqa: PLC0415

    for name in ("state", "arenas"):
        (folder / name).mkdir(mode=0o700)
    places = {"state_dir": str(folder / "state"), "arena_dir": str(folder / "arenas")}
    with (
        mock.patch.object(handshake, "boot_id", return_value=CLIENT_HOST),
        mock.patch.object(client, "boot_id", return_value=CLIENT_HOST),
        mock.patch.object(arena, "_mounts", return_value=1),
    ):
        settings = {**SETTINGS, **places}
        with serve(settings) as server:
            first = connect(server.address)
            held = [one for name in PARTITIONS[:2] for one in fill(first, name)]
            wait_in_image(first, PARTITIONS[0])
        with Journal.open(folder / "state") as journal:
            make_image(folder / "state", journal.last)
            journal.begin_from(journal.last)
        with serve(settings) as server:
            second = connect(server.address)
            held += [one for name in PARTITIONS[2:] for one in fill(second, name)]
            with connect(server.address) as third:
                third.checkpoint(folder / "checkpoint")
            (folder / "held.json").write_bytes(msgspec.json.encode(held))
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _serve(Path(sys.argv[1]))
    else:
        build(ARCHIVE, FORMATS)
