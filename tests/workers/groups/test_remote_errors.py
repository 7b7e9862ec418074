"""What is raised in a worker arrives as what it is, as far as it can be sent."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
from ray import cloudpickle

from workers.errors import WorkerCallError, WorkerExitError
from workers.groups.remote_errors import portable


class OfTwoFacts(Exception):
    """Cannot be made again from its `args`."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"code {code}: {why}")
        self.code = code


class Prefixed(Exception):
    """Made again from its `args`, it would say it twice."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")


class Locked(Exception):
    """Has what no process can send."""

    def __init__(self) -> None:
        super().__init__("locked", threading.Lock())
        self.lock = threading.Lock()


class Unsendable(Exception):
    def __reduce__(self) -> str:
        raise RuntimeError("never")

    def __str__(self) -> str:
        raise RuntimeError("never")


def sent(error: BaseException) -> Any:
    return pickle.loads(cloudpickle.dumps(portable(error)))


@pytest.mark.parametrize(
    "error", [KeyError("k"), FileNotFoundError(2, "No such file", "x"), OfTwoFacts(7, "late"), Prefixed("x")]
)
def test_type_and_message_are_kept(error: Exception) -> None:
    back = sent(error)
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


def test_what_cannot_be_sent_of_it_arrives_as_text() -> None:
    back = sent(Locked())
    assert type(back) is Locked
    assert "unlocked" in back.args[1]
    assert "unlocked" in back.lock


def test_a_class_made_in_the_worker_arrives() -> None:
    class Local(ValueError):
        pass

    assert isinstance(sent(Local("here")), ValueError)


def test_one_that_cannot_be_sent_at_all_is_told() -> None:
    back = sent(Unsendable())
    assert isinstance(back, WorkerCallError)
    assert back.kind == "tests.workers.groups.test_remote_errors.Unsendable"


def test_exits_are_told() -> None:
    back = sent(SystemExit(3))
    assert isinstance(back, WorkerExitError)
    assert (back.kind, back.message) == ("SystemExit", "3")
