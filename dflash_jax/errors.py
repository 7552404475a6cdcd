"""The one exception that means: the user can mend this."""


class UserError(Exception):
    """A mistake in a config, a path or an input file.

    The message is one line: what is wrong, where, and what to do. Scripts print it and exit with code 2.
    """
