"""Ctrl-C and SIGTERM as a request that the loop reads between steps."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """`name` is the signal's name once one has come."""

    name: str | None = None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """The first SIGINT or SIGTERM only sets the request; a second one interrupts at once."""
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        if request.name is not None:
            raise KeyboardInterrupt
        request.name = signal.Signals(number).name
        print(f"\n{request.name}: stopping after this step; once more to stop at once", file=sys.stderr)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
