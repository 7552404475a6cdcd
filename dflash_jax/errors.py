"""The exceptions that end a script without a traceback."""


class UserError(Exception):
    """A mistake in a config, a path or an input file.

    The message is one line: what is wrong, where, and what to do. Scripts print it and exit with code 2.
    """


class Interrupted(Exception):  # noqa: N818 - a stop, not an error
    """A signal ended the run after its state was saved; the message says how to go on. Exit code 130."""
