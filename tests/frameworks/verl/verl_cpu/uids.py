"""Prompt uids that are the same in each run: `model.external_lib` names this module, and verl imports it in the trainer
before the first prompt gets its uid. VERL_CPU_FIRST_UID is the first one: a run that goes on from a checkpoint has to
use others than the run before."""

import itertools
import os
import sys
from types import SimpleNamespace
from uuid import UUID

TRAINER = "verl.trainer.ppo.v1.trainer_base"

if (trainer := sys.modules.get(TRAINER)) is not None:
    _numbers = itertools.count(int(os.environ.get("VERL_CPU_FIRST_UID", "1")))
    trainer.uuid = SimpleNamespace(uuid4=lambda: UUID(int=next(_numbers)))  # type: ignore[attr-defined]
