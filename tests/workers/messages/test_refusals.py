# ruff: noqa: F401
"""What does not fit, or cannot be sent, is refused on both ends, and the pair stays usable."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.workers.messages.messengers import Here, address, here, one_connection, reported_to_sender, until_it_fails
from workers.directory.address import WorkerAddress
from workers.errors import (
    GroupOptionsError,
    MessageMismatchError,
    NoSuchRankError,
    NotSerializableError,
)
from workers.messages import CollectiveGroupOptions, all_of

pytestmark = pytest.mark.integration

A, B = address(0), address(1)
BIG = 3 << 20
"""float32 values that take several chunks."""


def _mismatches() -> list[Any]:
    """How a tensor is sent, and the target of recv_tensor, or None for recv."""
    cases: list[tuple[str, str, torch.Tensor, torch.Tensor | None]] = [
        ("send", "send", torch.ones(3), torch.zeros(3)),
        ("recv", "send_tensor", torch.ones(3), None),
        ("shape", "send_tensor", torch.ones(3), torch.zeros(3, 1)),
        ("dtype", "send_tensor", torch.ones(3), torch.zeros(3, dtype=torch.int32)),
        ("large", "send_tensor", torch.ones(BIG), torch.zeros(BIG - 1)),
    ]
    return [pytest.param(*case, id=name) for name, *case in cases]


@pytest.mark.parametrize(("send", "value", "target"), _mismatches())
def test_ends_that_do_not_fit_both_raise_and_the_pair_stays_usable(
    here: Here, send: str, value: torch.Tensor, target: torch.Tensor | None
) -> None:
    a, b = here.workers(2)
    receiving = here.start(b.recv, A) if target is None else here.start(b.recv_tensor, target, A)
    with pytest.raises(MessageMismatchError, match=r"g:0 sent .* but g:1 expected"):
        reported_to_sender(getattr(a, send)(value, B, async_op=True), a, B)
    with pytest.raises(MessageMismatchError, match=r"g:0 sent .* but g:1 expected"):
        receiving.result(60)
    a.send("fine", B)
    assert b.recv(A) == "fine"


def test_a_target_of_another_shape_is_not_touched(one_connection: Here) -> None:
    a, b = one_connection.workers(2)
    target = torch.zeros(2, 3)
    receiving = b.recv_tensor(target, A, async_op=True)
    a.send_tensor(torch.ones(3, 2), B, async_op=True)
    assert receiving is not None
    with pytest.raises(MessageMismatchError):
        receiving.wait()
    assert target.sum() == 0


def test_what_is_refused_after_send_returned_is_said_in_the_next_operation(
    one_connection: Here, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = one_connection.workers(2)
    a.send("first contact", B, async_op=True)
    b.recv(A)
    a.send("object", B)
    with pytest.raises(MessageMismatchError):
        b.recv_tensor(torch.zeros(3), A)
    with pytest.raises(MessageMismatchError, match="g:0 sent an object"):
        until_it_fails(lambda: a.send("before it is known", B))
    assert "was refused after its delivery" in caplog.text
    a.send("again", B)
    got = None
    while got != "again":
        got = b.recv(A)


def test_the_options_of_both_ends_are_compared_at_first_contact(here: Here) -> None:
    a, b = here.workers(2)
    receiving = here.start(b.recv, A, options=CollectiveGroupOptions(accel_max_ctas=4))
    theirs = r"g:0 and g:1 exchange messages with different options: g:0 with .*accel_max_ctas=2"
    sent = a.send(1, B, options=CollectiveGroupOptions(accel_max_ctas=2), async_op=True)
    with pytest.raises(GroupOptionsError, match=theirs):
        reported_to_sender(sent, a, B)
    with pytest.raises(
        GroupOptionsError, match=r"g:1 and g:0 exchange messages with different options: g:1 with .*accel_max_ctas=4"
    ):
        receiving.result(60)
    same = CollectiveGroupOptions(accel_max_ctas=8)
    receiving = here.start(b.recv, A, options=same)
    a.send(2, B, options=same)
    assert receiving.result(60) == 2
    a.send(3, B, options=CollectiveGroupOptions(is_high_priority_stream=True))
    assert b.recv(A) == 3


def test_no_options_are_the_default_ones(one_connection: Here) -> None:
    a, b = one_connection.workers(2)
    a.send(1, B, options=CollectiveGroupOptions(), async_op=True)
    assert b.recv(A) == 1


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


def test_an_object_that_cannot_be_sent(here: Here) -> None:
    a, b = here.workers(2)
    for value in (Stubborn(), threading.Lock(), [torch.ones(BIG), Stubborn()]):
        for async_op in (False, True):
            with pytest.raises(NotSerializableError, match="cannot be sent"):
                a.send(value, B, async_op=async_op)
    a.send("fine", B)
    assert b.recv(A) == "fine"


class Unloadable:
    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise RuntimeError("not here")


def test_an_object_that_cannot_be_received(here: Here) -> None:
    a, b = here.workers(2)
    a.send(Unloadable(), B)
    with pytest.raises(NotSerializableError, match="not here"):
        b.recv(A)
    a.send(Unloadable(), B)
    receiving = b.recv(A, async_op=True)
    for work in (receiving.then(pytest.fail, "called after an error"), all_of([receiving], "all", None)):
        with pytest.raises(NotSerializableError, match="not here"):
            work.wait()
    a.send("fine", B)
    assert b.recv(A) == "fine"


@pytest.mark.parametrize("value", ["text", torch.ones(2).to_sparse(), None])
def test_only_strided_tensors_go_in_place(one_connection: Here, value: Any) -> None:
    (a,) = one_connection.workers(1)
    with pytest.raises(TypeError, match="expect a dense tensor"):
        a.send_tensor(value, B)
    with pytest.raises(TypeError, match="expect a dense tensor"):
        a.recv_tensor(value, B)


@pytest.mark.parametrize(
    "target",
    [torch.zeros(1, 3).expand(2, 3), torch.zeros(6).unfold(0, 3, 1), torch.zeros(9).as_strided((3, 3), (2, 1))],
    ids=["expanded", "windows", "strided"],
)
def test_a_target_that_overlaps_itself_is_refused_and_takes_nothing(one_connection: Here, target: torch.Tensor) -> None:
    a, b = one_connection.workers(2)
    sent = torch.arange(float(target.numel())).reshape(target.shape)
    sending = a.send_tensor(sent, B, async_op=True)
    with pytest.raises(ValueError, match="some of its elements overlap"):
        b.recv_tensor(target, A)
    apart = torch.zeros(3, 2 * target.shape[0], 2).permute(1, 2, 0)[::2, 1][: target.shape[0], : target.shape[1]]
    b.recv_tensor(apart, A)
    assert torch.equal(apart, sent)
    assert sending is not None
    sending.wait()


def test_a_group_is_not_a_worker(one_connection: Here) -> None:
    (a,) = one_connection.workers(1)
    for operation in (lambda: a.send(1, WorkerAddress("g")), lambda: a.recv(WorkerAddress("g"))):
        with pytest.raises(ValueError, match="g is a whole worker group: name one of its workers"):
            operation()


def test_a_rank_that_the_group_has_not_is_refused_at_once(one_connection: Here) -> None:
    one_connection.client().register_worker_group("g", {"world_size": 2})
    a, b = one_connection.workers(2)
    operations = [
        lambda: a.send(1, address(9)),
        lambda: a.recv(address(9)),
        lambda: a.broadcast(1, [A, B, address(9)]),
    ]
    for operation in operations:
        with pytest.raises(NoSuchRankError, match="rank 9 of worker group 'g' does not exist; it has 2 workers"):
            operation()
    assert b.broadcast(None, [A, B, address(9)]) == 1
