"""Which tests run in the same process, and which begin first, when `make test` starts several processes."""

from __future__ import annotations

from xdist.scheduler.loadscope import LoadScopeScheduling

RAY = (
    ("policy", "rendezvous", "group", "results", "worker"),
    ("service", "builder", "channels", "start", "cluster"),
)
"""Tests that share a Ray cluster, by the first word of their module's name: two clusters are enough."""
GLOO = (
    "tests/workers/training/test_replica_group",
    "tests/workers/training/test_mixin",
    "tests/training/test_data_loader_siblings",
)
"""Modules that share the ranks of `tests/gloo.py`."""
SHARING = ("tests/ui/", "tests/compat/test_nemo_rl", "tests/compat/test_transfer_queue")
"""Modules of a folder that share a browser, or what both packages were seen to do."""
ALONE = (
    "tests/simulation/test_teeth",
    "tests/contract/test_drain",
    "tests/test_interrupts",
    "tests/workers/channels/test_names",
    "tests/workers/channels/test_processes",
)
"""Long modules without fixtures of their own: each of their tests may run in another process."""
FIRST = (
    "tests/ray/",
    "tests/workers/",
    "tests/test_docs",
    "tests/compat/",
    "tests/simulation/",
    "tests/deploy/",
    "tests/test_interrupts",
    "tests/ledger/test_model",
)
"""What takes long begins first."""


def place(nodeid: str) -> str:
    """Tests of one place run in one process, in order. In general that is a module, for the sake of its fixtures."""
    module = nodeid.partition("::")[0].removesuffix(".py")
    if module in ALONE:
        return nodeid
    name = module.rpartition("/")[2]
    if module.startswith("tests/ray/") and not name.endswith("nodes"):  # those have clusters of their own
        word = name.removeprefix("test_").partition("_")[0]
        return f"ray {next((at for at, words in enumerate(RAY) if word in words), 0)}"
    if module.startswith(SHARING):
        return module.rpartition("/")[0]
    return "gloo" if module in GLOO else module


def rank(nodeid: str) -> int:
    """Sorts tests by when they are to begin."""
    return next((at for at, start in enumerate(FIRST) if nodeid.startswith(start)), len(FIRST))


class ByPlace(LoadScopeScheduling):
    """Hands places to processes, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return place(nodeid)

    def schedule(self) -> None:
        self.config.option.loadscopereorder = False
        super().schedule()
