"""Decoders are made while modules are imported: msgspec 0.22 crashes if two threads make their
first decoders of the same class at once, because the second one finds a half-finished description
of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for top in ("dataplane", "workers") for path in (ROOT / top).rglob("*.py"))
MAKERS = {("dataplane/ledger/encoding/messages.py", "decoder"), ("workers/transport/encoding.py", "decoder")}
"""The functions that make decoders for other modules, while these are imported."""
DESCRIBED = {("dataplane/ledger/encoding/messages.py", "_mismatch")}
"""The functions that convert to types whose classes the decoders of their module describe."""
NO_CLASSES = {"Scalar", "list[Scalar]", "_Names"}
"""Types without a class whose description threads share."""


def made_in_functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield function and line of each decoder that is made, also within a call of msgspec, in a
    function."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            called = ast.unparse(call.func)
            types = [ast.unparse(each.value) for each in call.keywords if each.arg == "type"]
            if called == "msgspec.convert":
                types += [ast.unparse(call.args[1])]
            is_decoder = called.startswith("msgspec.") and called.endswith(".Decoder")
            is_typed = called.startswith("msgspec.") and not NO_CLASSES.issuperset(types)
            if is_decoder or is_typed or called in ("decoder", "messages.decoder"):
                yield function.name, call.lineno


def test_they_are_made_at_import() -> None:
    made = {
        (str(path.relative_to(ROOT)), function): line
        for path in FILES
        for function, line in made_in_functions(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert set(made) == MAKERS | DESCRIBED, made


FIRST_USE = """
import sys
import threading

sys.setswitchinterval(1e-6)
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages

unit = c.UnitInfo(
    unit=1, name="u", host="h", epoch=1, endpoints=(), arena_path="p", capacity_bytes=1, curve_key=""
)
reply = messages.encode(c.UnitList(units=(unit,)))
start = threading.Barrier(16)
results = []


def decode():
    start.wait()
    results.append(messages.decode_result(c.Units, reply).units[0].name)


threads = [threading.Thread(target=decode) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert results == ["u"] * 16, results
"""


@pytest.mark.integration
@pytest.mark.parametrize("attempt", range(3))
def test_threads_decode_their_first_replies_at_once(attempt: int) -> None:
    ended = subprocess.run([sys.executable, "-c", FIRST_USE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
