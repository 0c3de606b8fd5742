"""``megastable import``: a model of transformers as a run that trains it on."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from megastable.cli.model_progress import shown_progress
from megastable.core.errors import shown
from megastable.core.run_paths import default_run_dir


def import_model(
    folder: Annotated[
        Path, typer.Argument(metavar="HF_DIR", help="folder of a transformers model, with config.json and safetensors")
    ],
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN_FILE", help="the run file to write, e.g. gpt2.json; it must not exist")
    ],
    run_dir: Annotated[
        Path | None, typer.Option(help="run folder that gets the checkpoint; default: runs/<name of the run file>")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="text to train on: a file, folder or glob; default: Python's library, to try things out"),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="folder of the tokenizer; default: that of the model")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="set a key of the run file by its path, e.g. megastable.training.total_steps=1000; repeatable",
        ),
    ] = None,
) -> None:
    """Read a model of transformers, and write a run that trains it on.

    GPT-2, BLOOM, Llama and GPT-NeoX are read, from safetensors alone: nothing
    that could run code is opened. What we cannot compute, such as scaled rotary
    angles, is refused with the key of config.json.

    Written are RUN_FILE, with the model's keys and settings to begin with, and a
    checkpoint of step 0 in the run folder, with the tokenizer. The last line
    printed starts the run, on any number of stages, replicas and tensor ranks;
    the same line goes on after a stop. The first loss is that of the model in
    transformers on the same text.

    Learning rate, batch, steps and text are yours to choose: by --set now, or in
    the file. `megastable check RUN_FILE` reviews it. A model in 16 bits trains
    on in bf16, with fp32 masters.

    Nothing is overwritten. Exit code 2 where it cannot be imported.
    """
    from megastable.interop.import_model import ImportRequest
    from megastable.interop.import_model import import_model as read_and_write
    from megastable.training.run_folder import RunFolder

    run_folder = RunFolder(run_dir or default_run_dir(run_file))
    run_folder.check_unused()
    request = ImportRequest(folder, run_file, run_folder.checkpoints, text, tokenizer, overrides or [])
    with shown_progress() as progress:
        read_and_write(request, progress)
    where = "" if run_dir is None else f" --run-dir {shlex.quote(str(run_dir))}"
    print(f"wrote {shown(str(run_file))} and a checkpoint of step 0 in {shown(str(run_folder.checkpoints))}")
    print("train it on with")
    command = (
        f"deepspeed --num_gpus 1 launch/train.py --deepspeed_config {shlex.quote(str(run_file))}{where} --resume=auto"
    )
    print(f"  {shown(command)}")
