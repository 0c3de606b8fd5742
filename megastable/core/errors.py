"""The errors that are for the user to read, not for a traceback."""


class UserError(Exception):
    """A mistake in a file, key, value, path or layout.

    Its text is one readable message that names what is wrong and what is legal. Entry points print it without
    a traceback and exit with code 2.
    """

    exit_code = 2


class RunStoppedError(UserError):
    """A run that stops itself, on all ranks together, because going on would be a waste or would do harm.

    Its text is the diagnosis. Entry points print it without a traceback and exit with code 3.
    """

    exit_code = 3


class DamagedDataError(Exception):
    """Data on a disk that are found to be damaged in the middle of a step, by the ranks alone that read them.

    It is no ``UserError``, which all ranks meet together: the others wait in a collective, so that the rank has to end
    as after any failure, though without a traceback.
    """


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error of another package, whose texts may fill a page."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
