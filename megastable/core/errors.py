"""The errors that are for the user to read, not for a traceback, and text that is safe to show on a terminal."""

from __future__ import annotations

import textwrap

LONGEST_LIST_CHARACTERS = 400
"""Of the text of another package's error that lists what is legal."""
EXIT_CODE_FAILURE = 1
EXIT_CODE_HANG = 4
EXIT_CODE_ASKED_AND_SAVED = 75
"""The number that sysexits.h gives to a failure that is over when the program is started again."""
EXIT_CODE_ASKED_NOT_SAVED = 76


def shown(text: str, keep: str = "") -> str:
    r"""Return ``text`` with all that a terminal would obey instead of showing it written as an escape: ``\x1b``.

    Keys, paths and events come from outside, and what somebody else wrote must neither color nor clear a terminal, nor
    forge another line, nor turn letters round. Escaped are control characters, line breaks, bidirectional marks
    and other invisible ones, and halves of surrogate pairs, which no encoding can print.

    Args:
        keep: characters that stay as they are, such as the line breaks of a message in several lines.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else _escaped(character) for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class UserError(Exception):
    """A mistake in a file, key, value, path or layout.

    Its text is one readable message that names what is wrong and what is legal, and is safe to show on a terminal.
    Entry points print it without a traceback and exit with code 2.
    """

    exit_code = 2

    def __str__(self) -> str:
        return shown(super().__str__(), keep="\n")


class RunFolderError(UserError):
    """A run folder that this run may not write, which rank 0 alone finds out, for the others leave the folder to it."""


class RunStoppedError(UserError):
    """A run that stops itself, on all ranks together, because going on would be a waste or would do harm.

    Its text is the diagnosis. Entry points print it without a traceback and exit with code 3.
    """

    exit_code = 3


class AskedToStopError(RunStoppedError):
    """A run that ends before its last step because it was asked to, on all ranks together.

    Args:
        text: by what, and what was saved.
        saved: whether there is a checkpoint of the last step.
    """

    def __init__(self, text: str, saved: bool) -> None:
        super().__init__(text)
        self.exit_code = EXIT_CODE_ASKED_AND_SAVED if saved else EXIT_CODE_ASKED_NOT_SAVED


class DamagedDataError(Exception):
    """Data on a disk that are found to be damaged in the middle of a step, by the ranks alone that read them.

    It is no ``UserError``, which all ranks meet together: the others wait in a collective, so that the rank has to end
    as after any failure, though without a traceback.
    """


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error of another package, whose texts may fill a page.

    A line that ends with a colon says nothing without those that follow it: they are joined to it, up to a length.
    """
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    text = lines[0]
    if text.rstrip().endswith(":"):
        text = textwrap.shorten(" ".join(lines), LONGEST_LIST_CHARACTERS, placeholder=" ...")
    return f"{type(error).__name__}: {text}"
