"""Generated code is what `make proto` makes of proto/. Where the generator is installed that is tried; elsewhere the
sums that `make proto` wrote tell whether a source or its outcome was changed by itself."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUMS = ROOT / "proto" / "SHA256SUMS"
SOURCES = sorted(path.name for path in (ROOT / "proto").glob("*.proto"))
GENERATED = sorted(path.name for path in (ROOT / "dataplane" / "protocol" / "pb").glob("*_pb2*.py*"))


def generator() -> str | None:
    own = ROOT / ".venv-proto" / "bin" / "python"
    if own.exists():
        return str(own)
    return sys.executable if importlib.util.find_spec("grpc_tools") else None


def test_sources_and_outcome_belong_together() -> None:
    lines = [line.split(maxsplit=1) for line in SUMS.read_text(encoding="ascii").splitlines()]
    listed = {name: digest for digest, name in lines}
    found = [f"proto/{name}" for name in SOURCES] + [f"dataplane/protocol/pb/{name}" for name in GENERATED]
    assert sorted(listed) == sorted(found), "run `make proto`"
    changed = [name for name in found if hashlib.sha256((ROOT / name).read_bytes()).hexdigest() != listed[name]]
    assert not changed, "run `make proto`"


@pytest.mark.integration
@pytest.mark.skipif(generator() is None, reason="no generator here (.venv-proto, grpc_tools); the sums were compared")
def test_generating_again_changes_nothing(tmp_path: Path) -> None:
    python = generator()
    assert python is not None
    outs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    names = [f"dataplane/protocol/pb/{name}" for name in SOURCES]
    command = [python, "-m", "grpc_tools.protoc", f"-Idataplane/protocol/pb={ROOT / 'proto'}", *outs, *names]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    made = tmp_path / "dataplane" / "protocol" / "pb"
    assert sorted(path.name for path in made.iterdir()) == GENERATED
    for name in GENERATED:
        assert (made / name).read_bytes() == (ROOT / "dataplane" / "protocol" / "pb" / name).read_bytes(), (
            f"{name}: run `make proto`"
        )


@pytest.mark.parametrize("name", SOURCES)
def test_every_message_field_and_method_has_a_comment(name: str) -> None:
    lines = (ROOT / "proto" / name).read_text(encoding="utf-8").splitlines()
    bare = []
    for before, line in itertools.pairwise(lines):
        text = line.strip()
        declares = text.endswith(("{", "{}", ";")) and not text.startswith(("//", "syntax", "package", "reserved"))
        if declares and not before.strip().startswith("//"):
            bare.append(text)
    assert not bare
