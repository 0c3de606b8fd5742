"""What can be wrong with a checkpoint: each damage is done to a whole one, and names what its message has to name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from megastable.checkpoints.manifest import MANIFEST_NAME, MOST_BYTES
from tests.unit.checkpoints.checkpoint_examples import FIRST, SECOND, make_checkpoint

Damage = Callable[[Path], None]
QKV = "block_0.attention.input.weight"


def sealed(values: dict[str, Any]) -> str:
    """The text of a manifest whose checksum is right, so that only a rule can find what is wrong in it."""
    rest = {key: value for key, value in values.items() if key != "checksum"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return json.dumps({**rest, "checksum": xxh3_128_hexdigest(canonical.encode())})


def values_in(folder: Path) -> dict[str, Any]:
    """What the manifest of ``folder`` says."""
    values: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_text())
    return values


def with_value(value: Any, *path: str | int) -> Damage:
    """Put ``value`` at a place of the manifest, under a right checksum."""

    def damage(folder: Path) -> None:
        values = values_in(folder)
        inner: Any = values
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = value
        (folder / MANIFEST_NAME).write_text(sealed(values))

    return damage


def without(*path: str) -> Damage:
    """Remove a key of the manifest, under a right checksum."""

    def damage(folder: Path) -> None:
        values = values_in(folder)
        inner = values
        for part in path[:-1]:
            inner = inner[part]
        del inner[path[-1]]
        (folder / MANIFEST_NAME).write_text(sealed(values))

    return damage


def manifest_text(text: str | bytes) -> Damage:
    """Write a text in the place of the manifest."""

    def damage(folder: Path) -> None:
        (folder / MANIFEST_NAME).write_bytes(text if isinstance(text, bytes) else text.encode())

    return damage


def unsealed(folder: Path) -> None:
    """Leave the checksum out."""
    values = values_in(folder)
    del values["checksum"]
    (folder / MANIFEST_NAME).write_text(json.dumps(values))


def replaced(old: str, new: str) -> Damage:
    """Change a place of the manifest's text and leave its checksum as it is."""

    def damage(folder: Path) -> None:
        text = (folder / MANIFEST_NAME).read_text()
        assert old in text
        (folder / MANIFEST_NAME).write_text(text.replace(old, new, 1))

    return damage


def instead_of(name: str, make: Callable[[Path], object]) -> Damage:
    """Put something else in the place of a file."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def of_another_step(name: str) -> Damage:
    """Take a file from a whole checkpoint of another step."""

    def damage(folder: Path) -> None:
        other = make_checkpoint(folder.parent / "other", 77)
        (folder / name).write_bytes((other / name).read_bytes())
        shutil.rmtree(other.parent)

    return damage


def of_another_run(folder: Path) -> None:
    """Take a file from another run's checkpoint of the same step."""
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[::-1])


def of_format_1(folder: Path) -> None:
    """Write the manifest of the format that had no checksums."""
    values = {
        "format_version": 1,
        "state": {"step": 10},
        "run": {},
        "corpus_fingerprint": "abc",
        "world_size": 2,
        "versions": {},
        "files": {FIRST: 38},
        "monitors": {},
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(values, indent=2))


def zeroed(folder: Path) -> None:
    """Fill a file with zeros, as a file system may after a power cut."""
    (folder / FIRST).write_bytes(bytes(38))


def larger_than_any(path: Path) -> None:
    """Make a file of a manifest's name that no machine should read into memory; it takes no space."""
    path.touch()
    os.truncate(path, MOST_BYTES + 1)


def cut_to(share: float) -> Damage:
    """Cut the manifest short."""

    def damage(folder: Path) -> None:
        text = (folder / MANIFEST_NAME).read_bytes()
        (folder / MANIFEST_NAME).write_bytes(text[: int(share * len(text))])

    return damage


def flipped(name: str, position: int) -> Damage:
    """Flip a bit of a file."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[position] ^= 1
        (folder / name).write_bytes(content)

    return damage


PIECES = ("tensors", QKV, "pieces")

# Kind of damage -> how it is done, and what the message names.
OF_THE_MANIFEST: dict[str, tuple[Damage, str]] = {
    # The file.
    "no manifest": (lambda folder: (folder / MANIFEST_NAME).unlink(), "does not exist"),
    "empty": (manifest_text(""), "line 1"),
    "cut in the middle": (cut_to(0.5), "is not valid JSON"),
    "without its last bracket": (cut_to(0.995), "is not valid JSON"),
    "zeros, as after a power cut": (manifest_text("\0" * 300), "is not valid JSON"),
    "not UTF-8": (manifest_text(b'{"a": "\xff\xfe"}'), "is not UTF-8 text (byte 7)"),
    "UTF-16": (manifest_text("{}".encode("utf-16")), "is not UTF-8"),
    "a byte-order mark": (manifest_text(b"\xef\xbb\xbf{}"), "is not valid JSON"),
    "half of a surrogate pair": (replaced('"abc"', '"\\ud800"'), "corpus_fingerprint"),
    "nested deeper than the stack": (manifest_text("[" * 100_000), "nested"),
    "nested too deep": (manifest_text("[" * 50 + "]" * 50), "nested"),
    "a number of too many digits": (manifest_text('{"a": ' + "9" * 10_000 + "}"), "digits"),
    "larger than any manifest": (instead_of(MANIFEST_NAME, larger_than_any), "bytes"),
    "a folder in its place": (instead_of(MANIFEST_NAME, Path.mkdir), "is not a file"),
    "a pipe in its place": (instead_of(MANIFEST_NAME, os.mkfifo), "is not a file"),
    "a device in its place": (instead_of(MANIFEST_NAME, lambda path: path.symlink_to("/dev/zero")), "is not a file"),
    "a link to itself": (instead_of(MANIFEST_NAME, lambda path: path.symlink_to(MANIFEST_NAME)), "symbolic link"),
    "a link to nothing": (instead_of(MANIFEST_NAME, lambda path: path.symlink_to("gone")), "does not exist"),
    # The whole value.
    "null": (manifest_text("null"), "must hold a JSON object"),
    "a number": (manifest_text("3"), "must hold a JSON object"),
    "a text": (manifest_text('"x"'), "must hold a JSON object"),
    "a list": (manifest_text("[]"), "must hold a JSON object"),
    "an empty object": (manifest_text("{}"), "format_version"),
    "two objects": (manifest_text("{}{}"), "is not valid JSON"),
    "a key twice": (replaced('"loss": 5.25', '"loss": 5.25, "loss": 1.5'), "loss = 1.5: given twice"),
    "an unknown key": (with_value(1, "more"), "more = 1: unknown key"),
    # Format and checksum.
    "format version 1": (of_format_1, "format version 1, of an earlier megastable"),
    "a later format": (with_value(3, "format_version"), "format_version = 3: must be 2"),
    "no format version": (without("format_version"), "format_version"),
    "a text as format version": (with_value("2", "format_version"), 'format_version = "2"'),
    "true as format version": (with_value(True, "format_version"), "format_version = true"),
    "no checksum": (unsealed, "checksum = null: the rest of the file has"),
    "a number as checksum": (replaced('\n"checksum": "', '\n"checksum": 1, "more": "'), "more"),
    "another checksum": (replaced('\n"checksum": "', '\n"checksum": "0'), "is damaged: checksum"),
    "another value": (replaced('"loss": 5.25', '"loss": 5.26'), "checksum"),
    "another seed": (replaced('"seed": 1', '"seed": 2'), "checksum"),
    "other memory": (replaced("5.5", "5.6"), "checksum"),
    # The state.
    "the manifest of another step": (of_another_step(MANIFEST_NAME), "state.step = 77: must be 10"),
    "another step": (with_value(11, "state", "step"), "state.step = 11: must be 10"),
    "a negative step": (with_value(-5, "state", "step"), "state.step = -5"),
    "a step that is no whole number": (with_value(8.5, "state", "step"), "state.step = 8.5"),
    "a step with a point": (with_value(10.0, "state", "step"), "state.step = 10.0"),
    "a step that no run reaches": (with_value(10**18, "state", "step"), "state.step = 1000000000000000000"),
    "a step beyond 64 bits": (with_value(2**70, "state", "step"), "state.step"),
    "true as step": (with_value(True, "state", "step"), "state.step = true"),
    "a text as step": (with_value("10", "state", "step"), 'state.step = "10"'),
    "NaN as step": (with_value(float("nan"), "state", "step"), "state.step = NaN"),
    "null as step": (with_value(None, "state", "step"), "state.step = null"),
    "a list as state": (with_value([10, 80], "state"), "state = [10, 80]"),
    "null as state": (with_value(None, "state"), "state = null"),
    "no state": (without("state"), "state: is required"),
    "no samples": (without("state", "consumed_samples"), "state.consumed_samples: is required"),
    "another count": (with_value(1, "state", "epochs"), "state.epochs = 1: unknown key"),
    "negative samples": (with_value(-1, "state", "consumed_samples"), "state.consumed_samples = -1"),
    "more samples applied than consumed": (with_value(81, "state", "applied_samples"), "applied_samples (81)"),
    "more steps skipped than taken": (with_value(11, "state", "skipped_steps"), "skipped_steps (11)"),
    # The rest of the run.
    "no layout": (without("layout"), "layout: is required"),
    "no stages": (with_value(0, "layout", "num_stages"), "layout.num_stages = 0"),
    "a list as run": (with_value([], "run"), "run = []"),
    "a number as the run's sections": (with_value(3, "run", "megastable"), "run.megastable must be a section"),
    "a list as the run's pipeline": (with_value([], "run", "megastable", "pipeline"), "run.megastable.pipeline"),
    "null as monitors": (with_value(None, "monitors"), "monitors = null"),
    "a list as monitors": (with_value([], "monitors"), "monitors = []"),
    "a list as a monitor's memory": (with_value([1], "monitors", "loss_volatility"), "monitors.loss_volatility = [1]"),
    "a number as fingerprint": (with_value(1, "corpus_fingerprint"), "corpus_fingerprint = 1"),
    "a list as versions": (with_value([], "versions"), "versions = []"),
    "a number as a version": (with_value(2, "versions", "torch"), "versions.torch = 2"),
    "a text as scale": (with_value("65536", "loss_scaler", "cur_scale"), "loss_scaler.cur_scale"),
    "true as scale": (with_value(True, "loss_scaler", "cur_scale"), "cur_scale = true: must be a finite number"),
    "NaN as scale": (with_value(float("nan"), "loss_scaler", "cur_scale"), "loss_scaler.cur_scale = NaN"),
    "a negative scale": (with_value(-3.0, "loss_scaler", "cur_scale"), "loss_scaler.cur_scale = -3.0"),
    "half a hysteresis": (with_value(8.5, "loss_scaler", "cur_hysteresis"), "loss_scaler.cur_hysteresis = 8.5"),
    "a scaler that lacks a count": (without("loss_scaler", "cur_iter"), "loss_scaler.cur_iter: is required"),
    "negative updates": (with_value(-1, "optimizer_steps"), "optimizer_steps = -1"),
    "a text as loss": (with_value("low", "loss"), 'loss = "low"'),
    # The files.
    "null as files": (with_value(None, "files"), "files = null"),
    "a list as files": (with_value([FIRST], "files"), "files = ["),
    "a size as file": (with_value(38, "files", FIRST), f"files.{FIRST} = 38"),
    "a negative size": (with_value(-1, "files", FIRST, "bytes"), f"files.{FIRST}.bytes = -1"),
    "a checksum that is none": (with_value("x" * 32, "files", FIRST, "checksum"), f"files.{FIRST}.checksum"),
    "a file without checksum": (without("files", FIRST, "checksum"), f"files.{FIRST}.checksum: is required"),
    "a file outside the folder": (with_value({"bytes": 1, "checksum": "0" * 32}, "files", "../../passwd"), "passwd"),
    "a hidden file": (with_value({"bytes": 1, "checksum": "0" * 32}, "files", ".."), "files"),
    # The tensors.
    "null as tensors": (with_value(None, "tensors"), "tensors = null"),
    "a tensor without pieces": (with_value([], *PIECES), f"tensors.{QKV}.pieces"),
    "a scalar": (with_value([], "tensors", QKV, "shape"), f"tensors.{QKV}.shape"),
    "another shape": (with_value([6, 6], "tensors", QKV, "shape"), f"tensors.{QKV}: has pieces"),
    "ranges outside the shape": (with_value([5, 5], "tensors", QKV, "shape"), f"tensors.{QKV}: has ranges"),
    "a dimension that is not there": (with_value(2, *PIECES, 0, "dim"), f"tensors.{QKV}: is cut along dim 2"),
    "a negative dimension": (with_value(-1, *PIECES, 0, "dim"), "dim = -1"),
    "pieces along two dimensions": (with_value(1, *PIECES, 1, "dim"), f"tensors.{QKV}: is cut along dim 0 and"),
    "a piece that ends before it begins": (with_value(0, *PIECES, 2, "stop"), f"tensors.{QKV}: has pieces from 0 to 0"),
    "a gap between pieces": (with_value(8, *PIECES, 1, "start"), f"tensors.{QKV}: has pieces from 8 to 15 after"),
    "pieces that overlap": (with_value(6, *PIECES, 1, "start"), f"tensors.{QKV}: has pieces from 6 to 15 after"),
    "ranges that overlap": (with_value([[0, 2], [3, 4], [5, 6]], *PIECES, 2, "ranges"), f"tensors.{QKV}: has ranges"),
    "a range of three": (with_value([[0, 1, 2]], *PIECES, 2, "ranges"), f"tensors.{QKV}.pieces[2].ranges[0]"),
    "a piece in a file that is not listed": (with_value("rank_9", *PIECES, 0, "file"), f"tensors.{QKV} has a piece"),
}
OF_THE_FILES: dict[str, tuple[Damage, str]] = {
    "a file missing": (lambda folder: (folder / SECOND).unlink(), f"{SECOND} is missing"),
    "a file cut short": (lambda folder: os.truncate(folder / FIRST, 4), f"{FIRST} has 4 bytes instead of 38"),
    "a file too long": (lambda folder: os.truncate(folder / FIRST, 39), f"{FIRST} has 39 bytes instead of 38"),
    "an empty file": (lambda folder: os.truncate(folder / FIRST, 0), f"{FIRST} has 0 bytes"),
    "a folder in the place of a file": (instead_of(FIRST, Path.mkdir), f"{FIRST} is not a file"),
    "a pipe in the place of a file": (instead_of(FIRST, os.mkfifo), f"{FIRST} is not a file"),
    "a file that links to itself": (instead_of(FIRST, lambda path: path.symlink_to(FIRST)), f"{FIRST} cannot be read"),
}
"""Found by the sizes."""
OF_THE_CONTENT: dict[str, tuple[Damage, str]] = {
    "a flipped bit at the start": (flipped(FIRST, 0), FIRST),
    "a flipped bit at the end": (flipped(SECOND, -1), SECOND),
    "a file of zeros": (zeroed, FIRST),
    "a file of another step": (of_another_step(SECOND), SECOND),
    "a file of another run": (of_another_run, FIRST),
}
"""Found by reading the files alone."""
