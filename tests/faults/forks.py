"""Processes for scenes of faults, forked from a server that has imported all they need: a scene costs no import of
torch."""

from __future__ import annotations

import multiprocessing

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(
    [
        "tests.faults.players",
        "tests.faults.houses",
        "tests.faults.market",
        "tests.faults.network",
        "tests.faults.victim",
    ]
)
