"""Operations of consumer tasks, stepped by hand."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.client.operations import claim
from dataplane.client.operations.steps import Post, Send, Sent
from dataplane.client.session_state import Schema, Schemas, Warned
from dataplane.core.types import FieldSpec
from dataplane.data.meta import KVBatchMeta
from dataplane.errors import InvalidRequestError, StaleSampleError, UnsupportedValueError
from dataplane.ledger import commands as c

STATE: Any = SimpleNamespace(schemas=Schemas(), warned=Warned())
STATE.schemas.remember("p", Schema({"x": FieldSpec()}))


def claimed(**more: Any) -> c.Claimed:
    rows = {"rows": np.array([4, 5]), "generations": np.array([14, 15])}
    return c.Claimed(**{"ids": ("a", "b"), **rows, "fields": ("x",), "tags": (), "claim": 7, **more})


def meta() -> KVBatchMeta:
    made = KVBatchMeta("p", "train", ["a", "b"]).with_handles(np.array([4, 5]), np.array([14, 15]))
    return made.with_claims(np.array([7, 7]))


def test_a_claim_whose_answer_makes_no_meta_is_undone() -> None:
    command = claim.claim_command("p", "train", ["x"], 2)
    operation = claim.claim(STATE, command, None)
    assert operation.send(None) == Send(command)
    undo = operation.send(Sent(3, claimed(tags=(c.TagColumn(name="input_lengths", values=("two", "three")),))))
    assert isinstance(undo, Post)
    nack = undo.command
    assert isinstance(nack, c.Nack)
    assert (nack.partition, nack.task, nack.samples.generations.tolist()) == ("p", "train", [14, 15])  # type: ignore[union-attr]
    assert nack.claims is not None
    assert nack.claims.tolist() == [7, 7]
    with pytest.raises(ValueError, match="two"):
        operation.send(None)


def test_a_claim_gives_its_id_to_its_samples() -> None:
    operation = claim.claim(STATE, claim.claim_command("p", "train", ["x"], 2), None)
    operation.send(None)
    with pytest.raises(StopIteration) as done:
        operation.send(Sent(3, claimed()))
    assert done.value.value.claims.tolist() == [7, 7]


def test_what_was_cleared_comes_back_by_id_and_what_is_stale_is_named() -> None:
    operation = claim.settle_claims(STATE, c.Ack, meta())
    sent = operation.send(None)
    assert isinstance(sent, Send)
    assert sent.command.claims.tolist() == [7, 7]  # type: ignore[attr-defined]
    with pytest.raises(StopIteration) as done:
        operation.send(Sent(4, c.ClaimsSettled(cleared=np.array([1]))))
    assert done.value.value == ["b"]
    operation = claim.settle_claims(STATE, c.Nack, meta())
    operation.send(None)
    with pytest.raises(StaleSampleError, match="'a' of partition 'p' is not held") as caught:
        operation.throw(StaleSampleError(partition="p", task="train", samples=["sample 0"], positions=[0]))
    assert caught.value.samples == ["a"]


@pytest.mark.parametrize("given", [None, "lease", ["a"]])
def test_what_is_no_meta_is_refused(given: Any) -> None:
    with pytest.raises(UnsupportedValueError, match="claim_meta returned"):
        next(claim.settle_claims(STATE, c.Ack, given))


def test_a_meta_that_no_claim_returned_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="meta has no claim"):
        next(claim.settle_claims(STATE, c.Ack, KVBatchMeta("p", "train", ["a"])))


def test_nothing_is_asked_for_no_samples() -> None:
    with pytest.raises(StopIteration) as done:
        next(claim.settle_claims(STATE, c.Ack, meta().slice(0, 0)))
    assert done.value.value == []


def test_options_are_the_fields_of_the_commands() -> None:
    """So that an option that is in one of the two only is found."""
    arguments = {"partition", "task", "fields", "batch_size", "blocking", "timeout_s", "dp_rank", "dp_world", "step"}
    own = {"samples", "peek"}
    assert set(c.Claim.__struct_fields__) - arguments - own == set(claim.ClaimOptions.__annotations__)
    assert set(c.WhyBlocked.__struct_fields__) - arguments == set(claim.ClaimConditions.__annotations__)


@pytest.mark.parametrize("kind", [claim.ClaimConditions, claim.ClaimOptions])
def test_the_contract_of_every_option_is_written(kind: type) -> None:
    text = f"{claim.ClaimConditions.__doc__} {claim.ClaimOptions.__doc__}"
    assert [name for name in kind.__annotations__ if not re.search(rf"\b{name}[:=`]", text)] == []


def test_an_option_that_there_is_not_is_named() -> None:
    with pytest.raises(TypeError, match="group_sise"):
        claim.claim_command("p", "train", ["x"], 2, group_sise=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="peek"):
        claim.claim_command("p", "train", ["x"], 2, peek=True)  # type: ignore[call-arg]
