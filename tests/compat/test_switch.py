"""The switch in this process, on packages that a test writes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.job_config import JobConfig
from ray.runtime_env import RuntimeEnv

import dataplane.compat.transfer_queue as tq
from dataplane.compat import discovery, switch
from dataplane.compat.switch import (
    ALL,
    HOOK,
    VARIABLE,
    Replacement,
    carry_to_jobs,
    install,
    names_in,
    python_arguments,
    replaced,
    start,
    with_variable,
)
from tests.children import START_S

OURS = {
    "ours_tq/__init__.py": "from ours_tq.inner import Thing as Thing\nloads = []\n",
    "ours_tq/inner.py": "import ours_tq\nclass Thing: ...\n",
    "ours_tq/deep/__init__.py": "",
    "ours_tq/deep/more.py": "from ours_tq.inner import Thing\n",
    "ours_part/__init__.py": "NAME = __name__\n",
    "ours_part/leaf.py": "",
}
THEIRS = {
    "their_tq/__init__.py": "raise AssertionError('the original was imported')\n",
    "their_tq/absent.py": "",
    "their_whole/__init__.py": "NAME = __name__\n",
    "their_whole/part/__init__.py": "raise AssertionError('the original was imported')\n",
    "their_whole/other.py": "",
}
TABLE = {"their_tq": "ours_tq", "their_whole.part": "ours_part", "never": "ours_never"}


@pytest.fixture(params=[True, False], ids=["with the original", "without"])
def packages(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages that stand for ours and, installed or not, for the original; afterwards nothing of them is left."""
    whole = {name: text for name, text in THEIRS.items() if name.startswith("their_whole")}
    for name, text in {**OURS, **(THEIRS if request.param else whole)}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(switch, "MODULES", TABLE)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("their_", "ours_")):
            del sys.modules[name]


@pytest.fixture
def on(packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "their_tq, their_whole.part")
    install()


@pytest.mark.usefixtures("on")
def test_modules_and_classes_are_the_same_objects() -> None:
    space: dict[str, Any] = {}
    exec("import their_tq, ours_tq; import their_tq.deep.more as more; from their_tq.inner import Thing", space)  # noqa: S102
    their_tq, ours_tq, more, Thing = (space[name] for name in ("their_tq", "ours_tq", "more", "Thing"))
    assert their_tq is ours_tq
    assert more is sys.modules["ours_tq.deep.more"] is sys.modules["their_tq.deep.more"]
    assert more.Thing is Thing is ours_tq.Thing
    assert sys.modules["their_tq.inner"].__spec__.name == "ours_tq.inner"


@pytest.mark.usefixtures("on")
def test_the_order_of_imports_does_not_matter() -> None:
    ours = importlib.import_module("ours_tq.inner")
    assert importlib.import_module("their_tq.inner") is ours
    more = importlib.import_module("their_tq.deep.more")
    assert importlib.import_module("ours_tq.deep.more") is more
    assert more.Thing is ours.Thing


@pytest.mark.usefixtures("on")
def test_a_part_of_a_package_is_replaced_and_the_rest_is_the_packages() -> None:
    whole = importlib.import_module("their_whole")
    assert whole.NAME == "their_whole"
    assert importlib.import_module("their_whole.part").NAME == "ours_part"
    assert whole.part is sys.modules["ours_part"]
    assert importlib.import_module("their_whole.part.leaf") is importlib.import_module("ours_part.leaf")
    assert importlib.import_module("their_whole.other").__name__ == "their_whole.other"


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize(
    "line",
    [
        "import their_tq.absent",
        "import their_tq.absent.more",
        "from their_tq import absent",
        "from their_tq.absent import anything",
        "import their_tq.deep.absent",
        "from their_tq.deep import absent",
        "import ours_tq.absent",
    ],
)
def test_what_is_lacking_is_an_error_that_names_the_switch(line: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"No module named 'their_tq\.[a-z.]*absent'.*{VARIABLE}=") as caught:
        exec(line, {})  # noqa: S102
    assert caught.value.name is not None
    assert caught.value.name.endswith("absent")


@pytest.mark.usefixtures("on")
def test_it_is_found_without_an_import() -> None:
    found = importlib.util.find_spec("their_tq")
    assert found is not None
    assert str(found.origin).endswith("ours_tq/__init__.py")
    assert "their_tq" not in sys.modules
    assert importlib.util.find_spec("nobodys") is None
    for lacking in ("their_tq.absent", "their_tq.deep.absent", "ours_tq.absent"):
        assert importlib.util.find_spec(lacking) is None


@pytest.mark.usefixtures("on")
def test_pickles_of_both_names_go_through() -> None:
    thing = pickle.loads(b"ctheir_tq.inner\nThing\n)\x81.")
    assert type(thing) is importlib.import_module("ours_tq").Thing
    assert type(pickle.loads(pickle.dumps(thing))) is type(thing)


@pytest.mark.usefixtures("on")
def test_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("their_tq.inner", "their_tq", "their_tq.deep"):
        importlib.import_module(name)
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert said.getMessage() == f"import their_tq is replaced by ours_tq: {VARIABLE}=their_tq, their_whole.part"


@pytest.mark.usefixtures("on")
def test_what_is_replaced_can_be_found_out() -> None:
    assert replaced("their_tq")
    assert replaced("their_whole.part")
    assert replaced("never", "their_tq")
    assert not replaced("never")


@pytest.mark.usefixtures("on")
def test_a_second_one_changes_nothing() -> None:
    before = list(sys.meta_path)
    install()
    assert sys.meta_path == before


@pytest.mark.usefixtures("packages")
def test_a_wrong_value_is_an_error_that_no_fallback_swallows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks catch ImportError, and go on without the package."""
    monkeypatch.setenv(VARIABLE, "their_tq,thier_whole")
    install()
    assert not replaced("their_tq")
    for name in ("their_tq", "their_tq.inner", "their_whole.part"):
        with pytest.raises(ValueError, match=f"^{VARIABLE}='their_tq,thier_whole': expected 'all', or names from"):
            importlib.import_module(name)
    assert importlib.import_module("ours_tq").Thing


def test_values() -> None:
    assert names_in("") == names_in(" , ") == ()
    assert names_in("transfer_queue") == ("transfer_queue",)
    assert names_in(ALL) == names_in(f"transfer_queue,{ALL}") == tuple(switch.MODULES)


def test_every_module_of_the_table_is_there() -> None:
    for ours in switch.MODULES.values():
        assert importlib.util.find_spec(ours) is not None, ours


# --- Ray


@pytest.fixture
def job_config() -> type[Any]:
    """A class like Ray's, of its own, that carries the variable."""

    class Carrying(JobConfig):
        pass

    carry_to_jobs(Carrying, "their_tq")
    return Carrying


def test_every_job_carries_the_variable(job_config: Callable[..., Any]) -> None:
    assert job_config().runtime_env == {"env_vars": {VARIABLE: "their_tq"}}
    user = {"env_vars": {"A": "1"}, "working_dir": "s3://there.zip"}
    config = job_config(runtime_env=user)
    config.set_runtime_env(user)
    assert config.runtime_env == {**user, "env_vars": {"A": "1", VARIABLE: "their_tq"}}
    assert user["env_vars"] == {"A": "1"}
    config.set_runtime_env(RuntimeEnv(env_vars={"B": "2"}), validate=True)
    assert isinstance(config.runtime_env, RuntimeEnv)
    assert config.runtime_env["env_vars"] == {"B": "2", VARIABLE: "their_tq"}


def test_a_value_of_the_users_stays() -> None:
    assert with_variable({"env_vars": {VARIABLE: ""}}, "their_tq") == {"env_vars": {VARIABLE: ""}}


def test_ray_itself_refuses_what_is_wrong(job_config: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="env_vars"):
        job_config().set_runtime_env({"env_vars": ["A=1"]}, validate=True)


def test_rays_module_is_changed_when_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "job_config", ray.job_config)  # importing it again sets this
    monkeypatch.delitem(sys.modules, "ray.job_config")
    monkeypatch.setattr(sys, "meta_path", [Replacement("transfer_queue"), *sys.meta_path])
    fresh = importlib.import_module("ray.job_config")
    assert fresh.JobConfig().runtime_env == {"env_vars": {VARIABLE: "transfer_queue"}}
    assert JobConfig().runtime_env == {}


# --- python -m dataplane.compat.transfer_queue


@pytest.mark.parametrize(
    ("full", "own", "command"),
    [
        (["python", "-m", "ours", "-m", "job", "x"], ["ours.py", "-m", "job", "x"], ["-m", "job", "x"]),
        (
            ["python", "-m", "ours", "job.py", "-m", "ours"],
            ["ours.py", "job.py", "-m", "ours"],
            ["job.py", "-m", "ours"],
        ),
        (["python", "-u", "-X", "dev", "-m", "ours", "a"], ["ours.py", "a"], ["-u", "-X", "dev", "a"]),
        (["python", "-um", "ours", "a"], ["ours.py", "a"], ["-u", "a"]),
        (["python", "-mours", "a"], ["ours.py", "a"], ["a"]),
        (["python", "-m", "ours"], ["ours.py"], []),
    ],
)
def test_what_is_started_in_its_place(full: list[str], own: list[str], command: list[str]) -> None:
    assert python_arguments(full, own) == command


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What this process would become."""
    called: list[Any] = []
    monkeypatch.setattr(switch.os, "execve", lambda *arguments: called.append(arguments))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ours", "job.py"])
    monkeypatch.setattr(sys, "argv", ["ours.py", "job.py"])
    return called


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(("before", "after"), [("", "their_tq"), ("never", "never,their_tq"), ("their_tq", "their_tq")])
def test_the_name_is_added_to_the_variable(
    started: list[Any], before: str, after: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / HOOK).touch()
    monkeypatch.setenv(VARIABLE, before)
    start("their_tq")
    ((path, command, environment),) = started
    assert (path, command) == (sys.executable, [sys.executable, "job.py"])
    assert environment[VARIABLE] == after


@pytest.mark.usefixtures("packages")
def test_a_wrong_value_starts_nothing(started: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / HOOK).touch()
    monkeypatch.setenv(VARIABLE, "thier_tq")
    with pytest.raises(SystemExit, match="expected 'all', or names from"):
        start("their_tq")
    assert not started


def test_an_installation_without_the_hook_starts_nothing(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/nowhere"])
    with pytest.raises(SystemExit, match=f"{HOOK} was not found on sys.path"):
        start("transfer_queue")
    assert not started


# --- Which rendezvous a process has, and what a process of a cluster does without one.


ROOT = Path(__file__).parents[2]

KNOWN = """
import importlib, importlib.metadata, json, sys

importlib.metadata.entry_points = lambda **_: []  # as where the project is on PYTHONPATH, and not installed
for name in sys.argv[1:]:
    importlib.import_module(name)

from dataplane.compat.discovery import is_isolated, known

print(json.dumps([[type(each).__name__ for each in known()], "workers" in sys.modules, is_isolated()]))
"""


def known_in_process(*imports: str) -> list[Any]:
    """The types of the rendezvous that a process without metadata has after these imports, whether it has imported
    `workers`, and whether it is isolated."""
    command = [sys.executable, "-c", KNOWN, *imports]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.ray
@pytest.mark.parametrize("imports", [["ray"], ["ray", "workers"]])
def test_rays_is_found_without_metadata(imports: list[str]) -> None:
    assert known_in_process(*imports) == [["RayRendezvous"], True, False]


@pytest.mark.integration
def test_there_is_none_without_ray() -> None:
    assert known_in_process() == [[], False, False]
    assert known_in_process("workers") == [[], True, False]


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is in a Ray cluster, and cannot import `workers`."""
    for name in ("TQ_ADDRESS", "TQ_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(discovery, "_constructors", {})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "workers", None)  # its import fails
    for name in [name for name in sys.modules if name.startswith("workers.")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.integration
@pytest.mark.usefixtures("isolated")
def test_a_service_that_others_do_not_find_is_a_warning_with_its_address(caplog: pytest.LogCaptureFixture) -> None:
    conf = tq.init({"dataplane": {"capacity_bytes": 8 << 20}})
    try:
        assert conf is not None
        address = conf["controller"]["zmq_info"].address
        (warning,) = [record.getMessage() for record in caplog.records if "of its own" in record.getMessage()]
        assert f"Started a service of its own at {address}: " in warning
        assert "PYTHONPATH" in warning
    finally:
        tq.close()


@pytest.mark.usefixtures("isolated")
def test_a_service_name_needs_workers() -> None:
    with pytest.raises(ValueError, match=r"controller.name='shared': .* cannot import the package `workers`"):
        tq.init({"controller": {"name": "shared"}})


@pytest.mark.parametrize("missing", ["workers", "workers.service", "workers.service.discovery"])
def test_another_package_named_workers_is_not_ours(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(discovery.importlib, "import_module", fail)
    assert discovery._load("workers.service.discovery:RayRendezvous") is None


def test_a_package_that_the_rendezvous_needs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'zmq'", name="zmq")

    monkeypatch.setattr(discovery.importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="zmq"):
        discovery._load("workers.service.discovery:RayRendezvous")
