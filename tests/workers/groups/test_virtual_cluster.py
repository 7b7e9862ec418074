"""What a virtual cluster says of a node that does not hold ports. Without Ray."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayError

from workers.groups import virtual_cluster as module
from workers.groups.virtual_cluster import RayVirtualCluster, ResourcesNotReadyError


@pytest.mark.parametrize(
    ("error", "why"),
    [(GetTimeoutError("Get timed out"), "no response within 7 s"), (RayError("the actor died"), "the actor died")],
)
def test_a_node_that_gives_no_ports_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: RayError, why: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(module.ray, "get", fail)
    cluster = RayVirtualCluster([1])
    cluster.ready_timeout_s = 7.0
    keeper: Any = object()
    cluster._keepers["here"] = keeper
    ports: Any = object()
    with pytest.raises(ResourcesNotReadyError, match=f"^cannot hold ports on node here: {why}$"):
        cluster._held_ports(ports, "here")
    assert not cluster._keepers
