"""``megastable report``: a run as one interactive page that needs no network."""

from __future__ import annotations

import html
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from megastable.cli.report_data import report_data
from megastable.cli.report_forecast import planned
from megastable.cli.run_fields import status_of
from megastable.cli.run_files import RunReader, RunState
from megastable.core.errors import UserError, shown
from megastable.core.run_paths import RunPaths

TEMPLATES = Path(__file__).parent / "report_page"
FIRST_LINE = "<!doctype html><!-- written by megastable report -->"
"""By which a page of ours is known, and may be replaced."""
MOST_CONFIG_BYTES = 2**20


def report(
    run_dir: Annotated[Path, typer.Argument(help="a run folder, e.g. runs/quickstart; the run may still go on")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="the page to write; default: report.html in the run folder"),
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="another run folder, whose curves are drawn beside")] = None,
) -> None:
    """Write one interactive page of a run, which opens from the disk without a network.

    It has
    - loss, validation loss, gradient norm, learning rate, global batch, loss
      scale, TFLOPs and memory over samples, tokens, steps or time;
    - every layer over the watched steps: gradient norm, update over weight,
      and how much of the number format's maximum is used;
    - every event, in the curves and in a table: a click on one leads there;
    - the plan of the run file beside what was measured, and the run file.

    Time is the sum of the steps, without evaluations and saves. Of a long run
    the extremes of neighbouring steps are drawn, which the page says.

    A page that this command wrote before is replaced; any other file is not.
    Nothing else in the run folder is touched. Needs plotly, one of the extra
    packages called plot.

    Exit code 2 where there is nothing to show, or the page cannot be written.
    """
    target = run_dir / "report.html" if output is None else output
    _check_replaceable(target)
    state = _read(run_dir)
    compared = None if compare is None else _read(compare)
    plotly_js = _plotly_js()
    status = f"{status_of(state, time.time()).text}; as of {time.strftime('%Y-%m-%d %H:%M:%S')}"
    data = report_data(state, status, _config_text(state), compared)
    data["plan"] = planned(state)
    _write(target, page(data, plotly_js))
    print(f"wrote {shown(str(target))}")


def _read(run_dir: Path) -> RunState:
    """Read a whole run.

    Raises:
        UserError: it is no run folder, or nothing in it can be shown.
    """
    state = RunReader(run_dir, whole=True).refresh(time.time())
    if not state.steps and state.run is None:
        reasons = "; ".join(state.faults) or "it has neither a step nor a run file"
        raise UserError(f"{run_dir} holds nothing to show: {reasons}")
    return state


def _config_text(state: RunState) -> str:
    path = RunPaths(state.run_dir).config
    try:
        with open(path, "rb") as file:
            text = file.read(MOST_CONFIG_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return shown(text, keep="\n")


def _plotly_js() -> str:
    """Return the library that draws, to stand in the page.

    Raises:
        UserError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError("the page needs plotly: pip install 'megastable[plot]'") from error
    return str(get_plotlyjs())


# The page


def page(data: dict[str, Any], plotly_js: str) -> str:
    """Return the whole page."""
    parts = {name: (TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    title = html.escape(data["runs"][0]["name"])
    # In the order of the template: what was filled in is never looked at again, so that no text of a run can name a
    # place to fill.
    filled = {
        "TITLE": title,
        "CSS": parts["page.css"],
        "DATA": as_script_data(data),
        "PLOTLY": plotly_js,
        "JS": parts["page.js"],
    }
    pieces = [FIRST_LINE]
    rest = parts["page.html"]
    for name, text in filled.items():
        before, rest = rest.split(f"%{name}%", maxsplit=1)
        pieces += [before, text]
    return "".join([*pieces, rest])


def as_script_data(data: Any) -> str:
    """Return JSON that can stand inside a script element: no text of it can end the element or begin a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _check_replaceable(target: Path) -> None:
    """Check that nothing is lost where the page is written.

    Raises:
        UserError: something stands there that is no page of ours, or the folder does not exist.
    """
    if not target.parent.is_dir():
        raise UserError(f"{target.parent} is no folder to write {target.name} into")
    if not os.path.lexists(target):
        return
    if not target.is_file():
        raise UserError(f"{target} exists and is no file; name another with -o")
    with open(target, "rb") as file:
        is_ours = file.read(len(FIRST_LINE)) == FIRST_LINE.encode()
    if not is_ours:
        raise UserError(f"{target} exists and was not written by megastable report; name another file with -o")


def _write(target: Path, text: str) -> None:
    """Write the page beside its place, then put it there: a reader never sees half of it.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        handle, written = tempfile.mkstemp(prefix=".report.", dir=target.parent)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}; name another place with -o") from error
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # A temporary file is for its owner alone; a page is for whoever may read new files of the folder.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(written, 0o666 & ~umask)
        os.replace(written, target)
    except BaseException:
        os.unlink(written)
        raise
