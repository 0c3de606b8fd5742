"""The ``megastable`` command."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megastable.cli.check import print_findings
from megastable.cli.checkpoints import print_checkpoints
from megastable.cli.data import data_app, tokenizer_app
from megastable.cli.export import export
from megastable.cli.generate import generate
from megastable.cli.import_model import import_model
from megastable.cli.pictures import plot_run
from megastable.cli.plan import PlanRequest, print_forecast, print_layouts
from megastable.cli.report import report
from megastable.cli.watch import watch_run
from megastable.config import json_schema
from megastable.config.limits import MOST_PROCESSES
from megastable.core.devices import DEVICES
from megastable.core.errors import UserError, shown
from megastable.core.scripts import run_script
from megastable.planning.data_sheet_cost import DEFAULT_EFFICIENCY
from megastable.planning.preflight.preflight import preflight
from megastable.training.host import installed_gpus, look_at_text

UsageError: Any = typer.BadParameter.__base__
"""What typer raises for a command line that it refuses."""


class ShownErrors(TyperGroup):
    """Shows what was typed in a command line that is refused, and lets no terminal obey it."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse what stands before the command's name."""
        with _shown_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Parse the rest, and run the command."""
        with _shown_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _shown_errors() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        error.message = shown(error.message, keep="\n")
        raise


app = typer.Typer(
    cls=ShownErrors,
    help="Tools around pre-training a GPT. Training itself: deepspeed launch/train.py --deepspeed_config FILE.",
    no_args_is_help=True,
    # Rich's frames break the lines of a traceback, which the report of a fault needs whole.
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
    print(f"wrote {shown(str(output))}")


Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="override a key of the file by its path, e.g. megastable.training.total_steps=10; repeatable",
    ),
]
"""The option of the launch, with its words."""


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="a run file, e.g. ds_configs/quickstart.json")],
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_PROCESSES,
            help="processes of the launch; default: megastable.training.world_size, else one replica",
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print a list of objects: level, key, message, suggestion")
    ] = False,
) -> None:
    """Review a run file before it costs anything: seconds, no GPU, nothing written.

    Every finding names a key, why it matters with the number, and what to
    write instead.

    error: the launch would refuse it, or it is unsafe, such as fp16 without
    clipping or less text than one batch.

    warning: it runs, but risks the run or wastes its time, such as a std too
    large for the width, or a pipeline that idles.

    note: outside the customary, or good to know; it may stay as it is.

    Idle time and micro-batches are those of --world-size. The number format is
    held against this machine's GPUs, where it has any. The length of local text
    is estimated from file sizes; nothing is downloaded.

    Exit code 1 with errors, 0 without, 2 where the file cannot be read.
    """
    findings = preflight(config, world_size, installed_gpus(), look_at_text, overrides or [])
    print_findings(findings, str(config), as_json)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


# The options of `plan`, each with its help.
PlannedFile = Annotated[Path, typer.Argument(help="a run file, e.g. ds_configs/bloom_176b.json")]
Devices = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST_PROCESSES,
        help="devices of the launch; default: megastable.training.world_size, else one replica",
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(help=f"{', '.join(DEVICES)}, or cpu: this one, measured for ten seconds; without it no times"),
]
PeakTflops = Annotated[
    float | None, typer.Option(min=0.000001, max=1e9, help="peak of a device that is not in the table")
]
MemoryGib = Annotated[float | None, typer.Option(min=0.001, max=1e9, help="its memory")]
Efficiency = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=1,
        help=f"share of the peak that a stage reaches while it computes; {DEFAULT_EFFICIENCY} by default",
        show_default=False,
    ),
]
CalibrationPath = Annotated[
    Path | None, typer.Option(help="predict from this file of a sweep or a probe instead of a device")
]
NewCalibrationPath = Annotated[Path | None, typer.Option(help="write what --device cpu measured into this new file")]
Search = Annotated[bool, typer.Option("--search", help="rank the layouts that so many devices allow; needs --device")]
RampPicture = Annotated[
    Path | None, typer.Option(help="draw batch, TFLOPs and time over samples into this .png, .svg or .pdf")
]
TimelinePath = Annotated[
    Path | None,
    typer.Option(help="draw a step of the first phase, every rank's passes, into this .html, or .json for Perfetto"),
]
PlanAsJson = Annotated[bool, typer.Option("--json", help="print one object instead of tables")]


@app.command()
def plan(
    config: PlannedFile,
    overrides: Overrides = None,
    devices: Devices = None,
    device: DeviceName = None,
    peak_tflops: PeakTflops = None,
    memory_gib: MemoryGib = None,
    efficiency: Efficiency = None,
    calibration: CalibrationPath = None,
    save_calibration: NewCalibrationPath = None,
    search: Search = False,
    plot: RampPicture = None,
    timeline: TimelinePath = None,
    as_json: PlanAsJson = False,
) -> None:
    """Tell what a run will take before it is launched: steps, time, memory. No GPU, and nothing is
    written but the files that --plot, --timeline and --save-calibration ask for.

    The ramp is expanded as training will do it: the first step and sample of
    every batch, its micro-batches, and the share of the time that a pipeline
    of so many stages waits.

    With --device the time of a step is the operations and messages of its
    stages over the device's data sheet, played through the pipeline's
    schedule: an estimate, whose assumptions are printed with it. Measure a few
    steps and set --efficiency before you rely on it. Without --device no time
    is given.

    --device cpu without --peak-tflops and --memory-gib measures this machine
    for about ten seconds instead: the model's own layers, as many processes
    at a time as the launch has. --calibration takes times that were measured
    before, by benchmarks/tflops_vs_gbs.py or --save-calibration; they must be
    of the same model, stages and number format. --search knows neither.

    Memory is counted by stage and kind, for the run's number formats, ZeRO 1,
    recomputation and the micro-batches in flight.

    JSON has total_steps, total_samples, total_tokens, ramp (first_step,
    first_sample, global_batch_size, micro_batch_size, num_microbatches),
    phases (the same order: speed and time), memory in bytes, fits,
    assumptions. null is what is not known.

    --search tries stages x replicas x tensor ranks x micro-batch size x
    recomputation x start of the ramp (the file's, twice and four times it),
    all on the same samples, and ranks them by the time to train. What cannot
    be is listed with the reason. JSON then has layouts, feasible ones first.
    A larger start saves time because a fuller pipeline waits less; what it
    does to the training is yours to judge.

    Exit code 0, also where it does not fit; 2 where the file is refused.
    """
    request = PlanRequest(
        config, overrides or [], devices, device, peak_tflops, memory_gib, efficiency, calibration, save_calibration
    )
    if search:
        if timeline is not None:
            raise UserError("--timeline draws a step of one layout, and --search compares many; give one of them")
        print_layouts(request, as_json)
    else:
        print_forecast(request, plot, timeline, as_json)


@app.command()
def watch(
    run_dir: Annotated[Path, typer.Argument(help="a run folder, e.g. runs/quickstart")],
    refresh: Annotated[float, typer.Option(min=0.1, max=86_400, help="seconds between two looks at the files")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="print one frame and exit, as is done where the output is no terminal")
    ] = False,
) -> None:
    """Show a run while it goes on, from its files alone: on any machine that sees the folder. Ctrl-C leaves.

    Shown are
    - how far the run is, when it will be done, and how old its newest step is;
    - the newest step, and curves of loss and gradient norm;
    - the newest validation loss, how near values came to the number
      format's maximum, the slowest rank, the memory;
    - the last events;
    - every layer, with a mark at the values that stand out.

    Layers, maximum and slowest rank are of the newest monitored step
    (every megastable.monitors.interval steps). A run is called quiet after
    ten of its usual step times, and ten seconds, without a new step.

    Nothing is written into the folder. A resume that goes back is followed.
    """
    watch_run(run_dir, refresh, once)


@app.command()
def checkpoints(
    run_dir: Annotated[
        Path, typer.Argument(help="a run folder, e.g. runs/quickstart; or its checkpoints, or one of them")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="read every file and compare it with the checksum of its writing")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one object instead of a table")] = False,
) -> None:
    """List the checkpoints of a run, oldest first, and say which are whole.

    Shown are step, samples consumed, loss, the last evaluation's loss, the
    layout that wrote it (any other may continue it), size on the disk and age.

    A checkpoint is complete when its manifest obeys every rule and every file
    of it is there with its size. What sizes do not show, a flipped bit or a
    file of another step, --verify finds: it reads all bytes, and calls a
    checkpoint whole where they are those that were written.

    Listed as well is what a running run is about, or a killed one left:
    .partial is unfinished, .superseded is complete and makes way for a newer
    one of its step, .deleting is half deleted, .damaged was set aside for
    one of its step. A run cleans up the first three when it starts.

    JSON has path, newest_complete (its name, or null) and checkpoints, each
    with name, kind, step, complete, verified, faults (sentences), bytes,
    written_unix, age_seconds and, where the manifest can be read,
    consumed_samples, consumed_tokens, loss, eval_loss, layout.

    Nothing is written. Exit code 1 where --verify finds a fault in a
    checkpoint, 0 without, 2 where the path is no run folder.
    """
    if not print_checkpoints(run_dir, verify, as_json):
        raise typer.Exit(1)


app.command()(report)
app.command()(export)
app.command("import")(import_model)
app.command()(generate)
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")


def main() -> None:
    """Run the command as the console script does; a user's mistake ends with one message and exit code 2."""
    run_script(_exit_code)


def _exit_code() -> int | None:
    try:
        app()
    except OSError as error:
        # What the operating system refuses is not ours to mend: a name that is too long, a folder without permission.
        what = f"{error.filename}: " if error.filename is not None else ""
        print(f"error: {shown(what + (error.strerror or str(error)))}", file=sys.stderr)
        return 2
    return None
