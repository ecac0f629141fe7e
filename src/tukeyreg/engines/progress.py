"""How much has been read, for whoever sits at the terminal; never how it comes out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Progress"]

#: Seconds that a pass may take before anything is shown, and between updates.
_PATIENCE, _PAUSE = 1.0, 0.2


class Progress:
    """A line on the terminal with the number of rows read so far, which goes away in the end.

    The number of rows is private. So nothing is written to what is not a terminal, unless the
    caller asks for it.

    Parameters
    ----------
    wanted : bool or None
        None: only if the standard error stream is a terminal.
    """

    def __init__(self, wanted: bool | None) -> None:
        self._shown = sys.stderr.isatty() if wanted is None else wanted

    @contextmanager
    def of(self, what: str) -> Iterator[Callable[[int], None]]:
        """Report a pass: call with the number of rows read so far."""
        start = last = time.monotonic()
        written = False

        def report(rows: int) -> None:
            nonlocal last, written
            now = time.monotonic()
            if not self._shown or now - start < _PATIENCE or now - last < _PAUSE:
                return
            last, written = now, True
            speed = rows / (now - start) / 1e6
            line = f"\r{what}: {rows / 1e6:,.1f} million rows read, {speed:,.1f} million a second"
            sys.stderr.write(f"{line:<79}")
            sys.stderr.flush()

        try:
            yield report
        finally:
            if written:
                sys.stderr.write("\r" + " " * 79 + "\r")
                sys.stderr.flush()
