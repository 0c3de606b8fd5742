"""Run folders and files by any name that the file system takes: trained, resumed, loaded from and watched."""

from __future__ import annotations

import os

NAMES = {
    "a newline": "one\ntwo",
    "a leading dash": "-run",
    "a percent sign": "50%d %(prog)s",
    "brackets": "run[1] [bold]x[/bold] {0} *?",
    "quotes": "'run' \"x\" $HOME `y` \\n",
    "other letters": "größe_运行_🚀",
    "bytes of no encoding": os.fsdecode(b"run\xff\xfe"),
    "a trailing blank": "run ",
    "an escape": "\x1b[31mred\x1b[0m\r",
    "right to left": "run\u202egnol",
    "an equals sign": "a=b,c;d&e|f",
    "a tilde": "~nobody",
    "dots": "...",
    "250 letters": "x" * 250,
}
