"""A plugin of pytest for RLinf's `test_channel.py` under the switch.

The file makes half of its channels from RLinf's internals, to pretend to have several nodes. Here all are made by
`Channel.create`, so that its tests of what channels do can run.
"""

from typing import Any


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for module in {item.module for item in items}:
        if hasattr(module, "DistributedChannel"):
            module.DistributedChannel.create = module.Channel.create
