"""The ``megastable`` command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from megastable.cli.plot import plot_run
from megastable.config import json_schema
from megastable.core.errors import UserError

app = typer.Typer(
    help="Tools around pre-training a GPT. Training itself: deepspeed launch/train.py --deepspeed_config FILE.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a run file: every key with its type, range, default and meaning.

    Editors complete and check a run file whose "$schema" key names this output.
    """
    print(json.dumps(json_schema(), indent=2))


@app.command()
def plot(
    run_dir: Annotated[Path, typer.Argument(help="a run folder, e.g. runs/quickstart")],
    output: Annotated[Path, typer.Option(help="the picture to write: .png, .svg or .pdf")] = Path("run.png"),
) -> None:
    """Draw loss, global batch and TFLOPs of a run over its samples."""
    plot_run(run_dir, output)
    print(f"wrote {output}")


def main() -> None:
    """Entry point of the console script; a user's mistake ends with one message and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
