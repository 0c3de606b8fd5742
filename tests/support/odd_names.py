"""Names that a file system takes and a program may stumble over."""

from __future__ import annotations

import os

ODD_NAMES = {
    "a newline": "one\ntwo",
    "a leading dash": "-run",
    "a percent sign": "50%d %(prog)s %s",
    "brackets": "run[1] [bold]x[red] {0} *?",
    "quotes": "'run' \"x\" $HOME `y` \\n #!",
    "other letters": "größe_运行_🚀",
    "bytes of no encoding": os.fsdecode(b"run\xff\xfe"),
    "a trailing blank": "run ",
    "a leading blank": " run",
    "an escape": "\x1b[31mred\x1b[0m\r",
    "right to left": "run\u202egnol",
    "signs of a shell": "a=b,c;d&e|f<g>h",
    "a tilde": "~nobody",
    "dots": "...",
    "a long name": "x" * 240,
}
"""What is odd about a name -> the name; each is one of a folder, or with an ending of a file."""
