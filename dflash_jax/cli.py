"""What every script shares: one-line errors, exit codes, Ctrl-C."""

import logging
import sys
from collections.abc import Callable

from dflash_jax.errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class Interrupted(Exception):  # noqa: N818 - a stop, not an error
    """Raised when a run was stopped by a signal after its state was saved; the message says how to go on."""


def run(main: Callable[[], None]) -> None:
    """Call `main` and end the process: 0, 2 with one line on a `UserError`, 130 on an interruption.

    Any other exception keeps its traceback: it is a defect of the program, not of its input.
    """
    # Orbax and Grain report every file at INFO, absl at WARNING; scripts print their own progress.
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except Interrupted as stop:
        print(f"\ninterrupted: {stop}", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
