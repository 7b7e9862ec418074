"""Programs that a test starts, and that end with it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

END_S = 60.0
"""How long a program that is to end may take before it is killed."""
START_S = 240.0
"""How long a process of a test may take to start on a busy machine."""
_SHOWN = 4000


class Child(subprocess.Popen[str]):
    """A program with text pipes to its standard input and output; what it writes on standard error goes to a file.

    terminal: a descriptor that is all three instead. It belongs in a `with` block. At the end of the block it is waited
    for, and killed if it does not end within `END_S`. It is killed at once if the block raises; the exception then has
    a note with the end of its standard error.
    """

    def __init__(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, terminal: int | None = None
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in __exit__)
        way = subprocess.PIPE if terminal is None else terminal
        errors = self._errors if terminal is None else terminal
        super().__init__(command, stdin=way, stdout=way, stderr=errors, text=True, env=env)

    def line(self) -> str:
        """Its next line of output, without its end; AssertionError if it has ended."""
        assert self.stdout is not None
        line = self.stdout.readline()
        assert line, f"{self.args} ended: {self.stderr_text()}"
        return line.rstrip("\n")

    def stderr_text(self) -> str:
        """What it has written on standard error so far."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size, 0).decode(errors="replace")

    def finish(self, text: str | None = None) -> tuple[int, str, str]:
        """Write `text` to its input, close that, and wait for its end: (exit code, rest of its output, errors)."""
        output, _ = self.communicate(text, timeout=END_S)
        return self.returncode, output, self.stderr_text()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait(END_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.args} did not end within {END_S} s: {self.stderr_text()[-_SHOWN:]}") from None
        finally:
            self.kill()  # does nothing if it has ended
            super().__exit__(kind, error, trace)
            if error is not None:
                error.add_note(f"{self.args} wrote: {self.stderr_text()[-_SHOWN:]}")
            self._errors.close()
