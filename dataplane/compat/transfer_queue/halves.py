"""Halves of a checkpoint, which are not made here: what is known of samples is of no use without them, and saved one
after the other the two would not be of the same instant."""

from __future__ import annotations

from typing import NoReturn


class AwaitedHalves:
    """Each is a NotImplementedError, as from a storage of the original's that cannot save itself."""

    async def async_save_controller_checkpoint(self, path: str) -> None:
        _refuse("async_save_controller_checkpoint", path)

    async def async_load_controller_checkpoint(self, path: str) -> None:
        _refuse("async_load_controller_checkpoint", path)

    async def async_save_storage_checkpoint(self, checkpoint_dir: str) -> None:
        _refuse("async_save_storage_checkpoint", checkpoint_dir)

    async def async_load_storage_checkpoint(self, checkpoint_dir: str) -> None:
        _refuse("async_load_storage_checkpoint", checkpoint_dir)


class Halves:
    """The same for callers that block."""

    def save_controller_checkpoint(self, path: str) -> None:
        _refuse("save_controller_checkpoint", path)

    def load_controller_checkpoint(self, path: str) -> None:
        _refuse("load_controller_checkpoint", path)

    def save_storage_checkpoint(self, checkpoint_dir: str) -> None:
        _refuse("save_storage_checkpoint", checkpoint_dir)

    def load_storage_checkpoint(self, checkpoint_dir: str) -> None:
        _refuse("load_storage_checkpoint", checkpoint_dir)


def _refuse(name: str, place: str) -> NoReturn:
    verb = "load" if "load" in name else "save"
    raise NotImplementedError(
        f"{name}({place!r}): there are no halves of a checkpoint here; call the module's {verb}_checkpoint, which "
        "has the samples and what is known of them, as they were at one instant"
    )
