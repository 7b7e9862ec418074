"""What tests of the transfer engine share: whether there is one here, and how it is made to be used at once."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest

from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.transport.mooncake import engine_transport
from dataplane.storage.transport.mooncake.engine import Engine, EngineError, EngineSettings
from dataplane.storage.transport.mooncake.peers import Contacts

TRIAL_S = 60.0


@functools.cache
def why_not() -> str:
    """Why there is no transfer engine here; "" if there is one."""
    try:
        Engine(EngineSettings(host="127.0.0.1", protocol="tcp")).close()
    except EngineError as error:
        return str(error)
    return ""


def require_engine() -> None:
    """Skip the test, with the reason, where there is none."""
    if why_not():
        pytest.skip(why_not())


def use_at_once(patch: pytest.MonkeyPatch) -> Counter[str]:
    """From now on every payload, however small, goes by engine from the first call on. Counts those `stored` by units,
    and those `fetched` by clients."""
    counts: Counter[str] = Counter()
    ready, fill, fetch = Contacts.ready, engine_transport._fill, engine_transport.ClientEngine._fetch

    def ready_soon(contacts: Contacts, source: pb.Memory) -> bool:
        if ready(contacts, source):
            return True
        contacts.wait(TRIAL_S)
        return ready(contacts, source)

    def counting_fill(*payload: Any) -> None:
        fill(*payload)
        counts["stored"] += 1

    def counting_fetch(*source: Any) -> bool:
        is_there = fetch(*source)
        counts["fetched"] += is_there
        return is_there

    patch.setattr(Contacts, "ready", ready_soon)
    patch.setattr(engine_transport, "FROM_BYTES", 1)
    patch.setattr(engine_transport, "_fill", counting_fill)
    patch.setattr(engine_transport.ClientEngine, "_fetch", counting_fetch)
    return counts
