"""The step of the build that pyproject.toml has no words for: the switch's hook goes to the top of the wheel, because
Python reads `.pth` files only where packages lie."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HOOK = Path("dataplane", "compat", "rl_dataplane_switch.pth")


class BuildWithHook(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            place = self.get_finalized_command("install").install_lib  # the top of the editable wheel
        else:
            place = self.build_lib
        self.copy_file(str(HOOK), str(Path(place) / HOOK.name), preserve_mode=False)


setup(cmdclass={"build_py": BuildWithHook})
