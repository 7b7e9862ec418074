"""What shells complete, asked as bash asks."""

from __future__ import annotations

import os
import subprocess

import pytest

from dataplane import DataPlaneClient
from dataplane.cli import main
from tests.cli.service import TQ, filled  # noqa: F401

pytestmark = pytest.mark.integration


def completions(line: str, **more: str) -> list[str]:
    words = line.split(" ")
    environment = {
        **os.environ,
        "_TQ_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        **more,
    }
    done = subprocess.run(TQ, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tq ls t", ["train"]),
        ("tq clear --yes ", ["train"]),
        ("tq drop ", ["unit-0"]),
        ("tq checkpoint --partition ", ["train"]),
        ("tq why train ", ["policy", "critic"]),
        ("tq why train policy ids l", ["logprobs"]),
        ("tq serve --checksums a", ["across-hosts", "always"]),
    ],
)
def test_names_of_the_running_service(line: str, found: list[str], filled: DataPlaneClient) -> None:
    assert completions(line) == found


def test_a_service_that_the_line_names(filled: DataPlaneClient) -> None:
    assert completions(f"tq ls --address {filled.config.address} ", TQ_ADDRESS="127.0.0.1:1") == ["train"]


def test_no_service_is_no_names_and_no_noise() -> None:
    assert completions("tq ls ", TQ_ADDRESS="127.0.0.1:1") == []
    assert completions("tq ls ", TQ_ADDRESS="") == []


HOSTILE = [
    f"train{part}" for part in ("$(touch F)", "`touch F`", ";touch F", "'x", '"x', "\\x", " x", "\nx", "&", "|x")
]
HOSTILE += [f"train{part}" for part in (">x", "*", "?", "[a]", "{a,b}", "!x", "#x", "\x1b[2J", "\u202e")]
HOSTILE += ["~train", "--yes", "-y", "=train"]


def test_names_that_mean_something_to_a_shell_are_left_out(filled: DataPlaneClient) -> None:
    for name in HOSTILE:
        filled.register_partition(name, [name], None, [name])
    filled.register_partition("über/a.b-c_1:2", [*HOSTILE, "plain"], None, [*HOSTILE, "plain"])
    assert sorted(completions("tq ls ")) == ["train", "über/a.b-c_1:2"]
    assert completions("tq ls tr") == ["train"]
    assert completions("tq why über/a.b-c_1:2 ") == ["plain"]
    assert completions("tq why über/a.b-c_1:2 plain ") == ["plain"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda *_, **__: (shell, f"/bin/{shell}"))
    with pytest.raises(SystemExit) as left:
        main(["--show-completion"])
    assert left.value.code == 0
    assert f"complete_{shell}" in capsys.readouterr().out
