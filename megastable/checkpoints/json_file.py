"""Reading a JSON file that anybody may have written or damaged: its values, or one message.

The messages go on from the file's name, which the caller puts before them.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from megastable.config.reading.run_file import NestedTooDeepError, parse_json
from megastable.core.errors import UserError


def text_in(path: Path, most_bytes: int) -> str:
    """Read a text file.

    Raises:
        UserError: it is no file, cannot be read, is longer than ``most_bytes``, or is not UTF-8.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for its writer
            raise UserError("is not a file")
        if status.st_size > most_bytes:
            raise UserError(f"has {status.st_size:,} bytes, and may have at most {most_bytes:,}")
        return path.read_bytes().decode("utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError("does not exist") from error
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 text (byte {error.start})") from error
    except ValueError as error:  # what no path can hold
        raise UserError(f"cannot be read: {error}") from error


def object_in(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        UserError: it is none, gives a key twice, or is nested too deep.
    """
    try:
        values, faults = parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (NestedTooDeepError, ValueError) as error:  # also numbers of more digits than Python reads
        raise UserError(f"cannot be read: {error}") from error
    if faults:
        raise UserError(f"breaks a rule: {faults[0]}")
    if not isinstance(values, dict):
        raise UserError("must hold a JSON object: {...}")
    return values
