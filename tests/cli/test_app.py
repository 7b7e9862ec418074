"""The command line as a whole: its verbs, what wrong arguments get, what it loads, and what completes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dataplane import DataPlaneConfig, cli, connect, serve
from dataplane.cli import main
from dataplane.cli.app import app
from dataplane.cli.output import escaped
from dataplane.config import MIB
from dataplane.storage.unit import StorageUnit
from tests.cli.service import TQ
from tests.secure import tls

VERBS = [
    *("serve", "unit"),
    *("status", "top", "ls", "show", "why"),
    *("clear", "checkpoint", "restore", "drain", "drop"),
    "doctor",
]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TQ_ADDRESS", "TQ_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_the_verbs_are_pinned() -> None:
    assert [command.callback.__name__ for command in app.registered_commands if command.callback] == VERBS


def test_every_module_of_a_verb_is_in_the_table() -> None:
    heads = [path.read_text(encoding="utf-8").split("\n", 1)[0] for path in Path(cli.__file__).parent.glob("*.py")]
    assert {name for head in heads for name in re.findall(r"`tq (\w+)`", head)} == set(VERBS)


def test_the_manual_has_every_verb() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [name for name in VERBS if f"tq {name}" not in manual] == []


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in VERBS)])
def test_help_is_no_failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert "Usage: tq" in told.out
    assert told.err == ""


def test_paragraphs_of_help_are_broken_where_the_terminal_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 400)
    assert main(["drain", "--help"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "The rows pass" in line]
    assert line.strip().endswith("and undoes the drain.")


def test_help_has_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "Exit codes: 0 success, 1 failure" in capsys.readouterr().out


def test_no_command_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr()
    assert "checkpoint" in told.out
    assert told.err == "tq: a command is required; choose one of the above\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--capacity", "lots"], "'lots' is not a size"),
        (["serve", "--checksums", "sometimes"], "'sometimes' is not one of 'across-hosts'"),
        (["serve", "--units", "-1"], "--units"),
        (["serve", "--bogus"], "--bogus"),
        (["unit"], "ADDRESS"),
        (["status"], "set TQ_ADDRESS"),
        (["status", "127.0.0.1:1", "--address", "127.0.0.1:2"], "pass only one address"),
        (["checkpoint"], "PATH"),
        (["restore", "a", "b", "c"], "got 3"),
        (["dance"], "dance"),
        (["ls", "--limit", "0"], "--limit"),
        (["show"], "SAMPLE"),
        (["why", "train"], "TASK"),
        (["clear"], "PARTITION"),
        (["top", "127.0.0.1:1", "--interval", "0"], "--interval"),
        (["top", "127.0.0.1:1", "--interval", "inf"], "--interval"),
    ],
)
def test_wrong_arguments_get_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("tq")
    assert said in line
    assert line.endswith("--help`")


@pytest.mark.integration
def test_no_service_is_exit_1_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize("verb", ["status", "ls", "show a", "why train policy", "top --once --interval 0.1"])
def test_tokens_and_certificates_are_shown(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, secured: str
) -> None:
    # A busy machine may take longer than the default of 10 s, for which the command line has no flag.
    monkeypatch.setitem(DataPlaneConfig.__init__.__kwdefaults__, "connect_timeout_s", 60.0)
    token = tmp_path / "token"
    token.write_text("secret")
    files = [f"--tls-{name}={tls()[f'tls_{name}_file']}" for name in ("cert", "key", "ca")]
    arguments = [*verb.split(), "--address", secured]
    assert main([*arguments, *files, "--token-file", str(token)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TQ_TOKEN", "guess")
    assert main([*arguments, *files]) == 1
    assert "token" in capsys.readouterr().err
    monkeypatch.setenv("TQ_TOKEN", "secret")
    assert main(arguments) == 1
    assert "TLS" in capsys.readouterr().err


@pytest.fixture(scope="module")
def secured() -> Iterator[str]:
    """The address of a service with a token and TLS, and a sample `a` in partition `train`."""
    settings = {"token": "secret", **tls()}
    with serve({"capacity_bytes": 8 * MIB, **settings}) as server, connect(server.address, **settings) as client:
        client.register_partition("train", ["x"], None, ["policy"])
        client.put_samples(["a"], "train", {"x": torch.zeros(1)})
        yield server.address


BAD = "\x1b[2J\x07"
"""What would clear the terminal that it is written to."""


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    """The address of a service in which every name has control characters; storage unit 2 is called so as well."""
    with (
        serve({"capacity_bytes": 8 * MIB}) as server,
        StorageUnit(DataPlaneConfig(capacity_bytes=8 * MIB), server.address, name=f"unit{BAD}"),
        connect(server.address, client_name=f"client{BAD}") as client,
    ):
        client.register_partition(f"part{BAD}", [f"field{BAD}"], None, [f"task{BAD}"])
        tags = [{f"tag{BAD}": f"value{BAD}"}]
        client.put_samples([f"sample{BAD}"], f"part{BAD}", {f"field{BAD}": torch.zeros(1)}, tags=tags)
        yield server.address


@pytest.mark.integration
@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["top", "--once", "--interval", "0.1"],
        ["ls"],
        ["ls", f"part{BAD}"],
        ["ls", f"none{BAD}"],
        ["show", f"sample{BAD}"],
        ["show", f"none{BAD}"],
        ["why", f"part{BAD}", f"task{BAD}", f"field{BAD}", "--where", f"tag{BAD} == x{BAD}"],
        ["why", f"part{BAD}", f"none{BAD}"],
        ["clear", f"part{BAD}", f"none{BAD}"],
        ["drain", f"unit{BAD}", "--undo"],
        ["drop", f"none{BAD}"],
        ["checkpoint", "PATH"],
    ],
    ids=lambda arguments: "-".join(word.removesuffix(BAD) for word in arguments[:2]),
)
def test_no_name_can_write_on_the_terminal(
    arguments: list[str], hostile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / "saved") if word == "PATH" else word for word in arguments]
    main([*given, "--address", hostile])
    told = capsys.readouterr()
    assert told.out or told.err
    assert not {"\x1b", "\x07"} & set(told.out + told.err)


@pytest.mark.integration
@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--address", "{}:1"],
        ["status", "--address", "{}"],
        ["status", "127.0.0.1:1", "--address", "{}"],
        ["status", "127.0.0.1:1", "--token-file", "{}"],
        ["status", "127.0.0.1:1", "--{}"],
        ["status", "127.0.0.1:1", "--tls-cert", "{}", "--tls-key", "{}", "--tls-ca", "{}"],
        ["unit", "{}:1"],
        ["serve", "--units", "{}"],
        ["serve", "--arena-dir", "/none/{}"],
        ["serve", "--host", "{}"],
        ["top", "127.0.0.1:1", "--http", "{}"],
        ["top", "127.0.0.1:1", "--interval", "{}"],
        ["bench", "--address", "{}:1"],
        ["{}"],
    ],
    ids=" ".join,
)
def test_no_argument_can_write_on_the_terminal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.format(f"a\n{BAD}") for word in arguments]) in (1, 2)
    told = capsys.readouterr()
    assert told.out == ""
    line, end = told.err[:-1], told.err[-1:]
    assert end == "\n"
    assert line.startswith("tq")
    assert line.isprintable()


@pytest.mark.parametrize("text", ["plain – ünïcode", "a\tb\x1b[2J\x9b\u202e\udcff"])
def test_escaped_text_says_what_it_was(text: str) -> None:
    assert escaped(text).isprintable()
    assert escaped(text).encode().decode("unicode_escape" if escaped(text).isascii() else "utf-8") == text


def test_control_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dataplane.client.rpc.channel.ControllerChannel.open", interrupt)
    assert main(["ls", "--address", "127.0.0.1:1"]) == 130


@pytest.mark.integration
def test_a_reader_that_has_enough_gets_no_traceback(secured: str) -> None:
    files = [f"--tls-{name}={tls()[f'tls_{name}_file']}" for name in ("cert", "key", "ca")]
    command = [*TQ, "ls", "--address", secured, *files]
    ours, theirs = os.pipe()
    os.close(ours)  # nobody reads
    environment = {**os.environ, "TQ_TOKEN": "secret"}
    with os.fdopen(theirs) as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.integration
def test_help_loads_nothing_heavy() -> None:
    code = (
        "import contextlib, io, sys\nfrom dataplane.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main(['--help'])\n"
        "print(' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(done.stdout.split())
    assert "typer" in loaded
    assert not loaded & {"torch", "tensordict", "numpy", "zmq", "grpc", "google", "ray", "pydantic"}


@pytest.mark.integration
def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tq 0.")
