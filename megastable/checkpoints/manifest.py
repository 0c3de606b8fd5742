"""The manifest of a checkpoint: whose state it is, which files hold it, and which piece of which tensor lies where.

It is written last, so that a folder without one is no checkpoint. Whatever stands in the file, reading it gives a
manifest that obeys every rule below, or one message.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from xxhash import xxh3_128_hexdigest

from megastable.checkpoints.json_file import object_in, text_in
from megastable.config.limits import MOST_PROCESSES, MOST_STEPS
from megastable.config.reading.faults import NO_VALUE, Fault
from megastable.config.reading.messages import dotted
from megastable.config.section import Section
from megastable.core.errors import UserError
from megastable.core.flush import flush_to_disk
from megastable.core.records import Rollback, TrainingState

MANIFEST_NAME: Final = "manifest.json"
FORMAT_VERSION: Final = 2
CHECKSUM_KEY: Final = "checksum"
LARGEST_COUNT: Final = 2**62
MOST_BYTES: Final = 2**28
"""A piece takes about 200 bytes of it; what is larger is no manifest, and is not read."""
LARGEST_DIM: Final = 16
TENSORS_SUFFIX: Final = ".safetensors"
"""Of the files that hold tensors; the others are the tokenizer's."""
NO_CORPUS: Final = ""
"""The fingerprint in a checkpoint of which no data were consumed, such as an imported model."""
RECORDED_PACKAGES: Final = ("megastable", "torch", "deepspeed")

Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Size = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]


def _matches(pattern: str, legal: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise PydanticCustomError("pattern", "must be {legal}", {"legal": legal})
        return text

    return AfterValidator(check)


Checksum = Annotated[str, _matches("[0-9a-f]{32}", "32 hexadecimal digits")]
"""xxh3_128."""
FILE_NAME_PATTERN: Final = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}"
FileName = Annotated[str, _matches(FILE_NAME_PATTERN, "the plain name of a file in the folder")]
"""No path leads out of the folder, and no name is hidden or holds what a terminal would obey."""


def _finite_number(value: object) -> object:
    # To Python, JSON's true is the number 1.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PydanticCustomError("number", "must be a finite number")
    return value


Number = Annotated[int | float, BeforeValidator(_finite_number)]


FEWEST_SKIPS_OF_A_ROW = 2


class RollbackRecord(Section):
    """A return of the run to an earlier state, as in ``core.records.Rollback``."""

    from_step: int = Field(ge=0, le=MOST_STEPS)
    to_step: int = Field(ge=0, le=MOST_STEPS)
    first_sample: Count
    next_sample: Count


class StateRecord(Section):
    """The counts of ``core.records.TrainingState``."""

    step: int = Field(ge=0, le=MOST_STEPS)
    consumed_samples: Count
    applied_samples: Count
    consumed_tokens: Count
    skipped_steps: Count
    # Checkpoints that were written before samples could be left out lack both.
    left_out_samples: Count = 0
    rollbacks: tuple[RollbackRecord, ...] = ()

    @classmethod
    def of(cls, state: TrainingState) -> StateRecord:
        """Record ``state``."""
        return cls(**state.to_dict())

    def to_training_state(self) -> TrainingState:
        """Return the state that was recorded."""
        rollbacks = tuple(Rollback(**rollback.model_dump()) for rollback in self.rollbacks)
        return TrainingState(**self.model_dump(exclude={"rollbacks"}), rollbacks=rollbacks)

    @model_validator(mode="after")
    def _parts_are_within_their_wholes(self) -> StateRecord:
        if self.applied_samples > self.consumed_samples:
            raise _fault(f"has more applied_samples ({self.applied_samples}) than consumed_samples")
        if self.skipped_steps > self.step:
            raise _fault(f"has more skipped_steps ({self.skipped_steps}) than steps ({self.step})")
        return self


class LayoutRecord(Section):
    """The layout of the run that wrote the checkpoint; any other may continue it."""

    num_stages: Processes
    data_parallel_size: Processes
    tensor_parallel_size: Processes

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return self.num_stages * self.data_parallel_size * self.tensor_parallel_size


class ScalerRecord(Section):
    """The position of a dynamic loss scaler, by DeepSpeed's names; its settings are the run file's."""

    cur_scale: Annotated[Number, Field(gt=0)]
    cur_iter: Count
    last_overflow_iter: int = Field(ge=-1, le=LARGEST_COUNT)
    cur_hysteresis: Count


class FileRecord(Section):
    """The size of a file of the checkpoint, and the xxh3_128 of its bytes."""

    bytes: Count
    checksum: Checksum


Span = tuple[Count, Count]
"""First index, and the one after the last."""


class PieceRecord(Section):
    """The elements [start, stop) of a flattened shard, which takes ``ranges`` along ``dim`` of the whole tensor."""

    file: FileName
    dim: int = Field(ge=0, lt=LARGEST_DIM)
    ranges: tuple[Span, ...] = Field(min_length=1)
    start: Count
    stop: Count


class TensorRecord(Section):
    """The shape of a whole tensor, and the pieces that make it: every element in exactly one."""

    shape: tuple[Size, ...] = Field(min_length=1, max_length=LARGEST_DIM)
    pieces: tuple[PieceRecord, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _pieces_make_the_whole(self) -> TensorRecord:
        dim = self.pieces[0].dim
        if dim >= len(self.shape):
            raise _fault(f"is cut along dim {dim}, and its shape {list(self.shape)} has {len(self.shape)} of them")
        shards: dict[tuple[Span, ...], list[Span]] = defaultdict(list)
        for piece in self.pieces:
            if piece.dim != dim:
                raise _fault(f"is cut along dim {dim} and along dim {piece.dim}; pieces share one")
            shards[piece.ranges].append((piece.start, piece.stop))
        _check_tiling("ranges", (span for ranges in shards for span in ranges), self.shape[dim])
        slice_elements = math.prod(self.shape) // self.shape[dim]
        for ranges, spans in shards.items():
            width = sum(stop - start for start, stop in ranges)
            _check_tiling("pieces", spans, width * slice_elements)
        return self


def _check_tiling(what: str, spans: Iterable[Span], length: int) -> None:
    end = 0
    for start, stop in sorted(spans):
        if start != end or stop <= start:
            raise _fault(f"has {what} from {start} to {stop} after those up to {end}; each must begin where one ends")
        end = stop
    if end != length:
        raise _fault(f"has {what} up to {end}, and must have them up to {length}")


class Manifest(Section):
    """Describes a whole checkpoint."""

    # A skipped step may have a loss that is not finite, and a monitor may remember it.
    model_config = ConfigDict(allow_inf_nan=True)

    format_version: Literal[2] = FORMAT_VERSION
    state: StateRecord
    layout: LayoutRecord
    run: dict[str, JsonValue]
    """The run file that the checkpoint was trained with."""
    corpus_fingerprint: str
    """Hash of the tokens and their split; other data would give the consumed samples another meaning. Or NO_CORPUS."""
    versions: dict[str, str]
    """Package to its version."""
    monitors: dict[str, dict[str, JsonValue]]
    """What each of the run's monitors remembers."""
    loss_scaler: ScalerRecord | None
    """None in a run without loss scaling."""
    optimizer_steps: Count
    """Applied updates of Adam."""
    loss: float | None
    eval_loss: float | None
    files: dict[FileName, FileRecord]
    """By their names in the folder."""
    tensors: dict[str, TensorRecord]
    """By their global names."""

    @property
    def is_in_skips(self) -> bool:
        """Tell whether the run had skipped several steps in a row when it was saved, and may go on with that."""
        return in_skips(self.monitors)

    def is_at_its_end(self) -> bool:
        """Tell whether the run as its file was then had taken all its steps."""
        sections: Any = self.run.get("megastable", {})
        training = sections.get("training", {})
        total_steps, total_samples = training.get("total_steps"), training.get("total_samples")
        steps_are_done = isinstance(total_steps, int) and self.state.step >= total_steps
        return steps_are_done or (isinstance(total_samples, int) and self.state.consumed_samples >= total_samples)

    @property
    def is_diverging(self) -> bool:
        """Tell whether the loss had been far above its lowest value when the run was saved."""
        steps = self.monitors.get("divergence", {}).get("steps_above")
        return isinstance(steps, int) and steps > 0

    @model_validator(mode="after")
    def _pieces_lie_in_listed_files(self) -> Manifest:
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                if piece.file not in self.files:
                    raise _fault(f"tensors.{name} has a piece in {piece.file!r}, which is not among the files")
        return self

    @model_validator(mode="after")
    def _run_is_made_of_sections(self) -> Manifest:
        sections = self.run.get("megastable", {})
        if not isinstance(sections, dict):
            raise _fault("run.megastable must be a section: {...}")
        for name, section in sections.items():
            if not isinstance(section, dict):
                raise _fault(f"run.megastable.{name} must be a section: {{...}}")
        return self

    @property
    def tokenizer_files(self) -> list[str]:
        """List the files that make up the tokenizer; none in a checkpoint that was written without one."""
        return sorted(name for name in self.files if not name.endswith(TENSORS_SUFFIX))


def in_skips(monitors: Mapping[str, Mapping[str, Any]]) -> bool:
    """Tell by what the monitors remember whether the run has skipped several steps in a row by now."""
    skips = monitors.get("skipped_steps", {}).get("consecutive_skips")
    return isinstance(skips, int) and skips >= FEWEST_SKIPS_OF_A_ROW


def recorded_versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a checkpoint holds."""
    return {package: version(package) for package in RECORDED_PACKAGES}


def _fault(message: str) -> PydanticCustomError:
    # Through a placeholder: a name of the file may hold braces itself.
    return PydanticCustomError("manifest", "{message}", {"message": message})


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write the manifest into ``folder`` so that it survives a power cut once this returns.

    Raises:
        UserError: a value, such as a monitor's memory, would not be read back.
    """
    values = manifest.model_dump()
    text = _as_text({**values, CHECKSUM_KEY: _checksum_of(values)})
    # Better now, while the run still has the state, than at a resume.
    _manifest_of(text)
    path = folder / MANIFEST_NAME
    path.write_text(text, encoding="utf-8")
    flush_to_disk(path, folder)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint; whether the files beside it are whole is not looked at.

    Raises:
        UserError: there is none, or it breaks a rule, or it is of another step than the folder's name; the folder, the
            key, its value and what is legal are named.
    """
    try:
        manifest = _manifest_of(text_in(folder / MANIFEST_NAME, MOST_BYTES))
    except UserError as error:
        raise UserError(f"{folder} is no whole checkpoint: {MANIFEST_NAME} {error}") from error
    # The absolute path, for "." has no name; links are not followed, since ``best`` may lead to any step.
    named_step = step_in_name(os.path.basename(os.path.abspath(folder)))
    if named_step not in (None, manifest.state.step):
        raise UserError(
            f"{folder} is no whole checkpoint: {MANIFEST_NAME} is of another one: "
            f"{Fault('state.step', manifest.state.step, f'must be {named_step}, as in the name of the folder')}"
        )
    return manifest


def _manifest_of(text: str) -> Manifest:
    """Parse a manifest and check it.

    Raises:
        UserError: the message goes on from the file's name.
    """
    values = object_in(text)
    version = values.get("format_version")
    if version == 1 and not isinstance(version, bool):
        raise UserError("has format version 1, of an earlier megastable; continue the run with the one that wrote it")
    if version != FORMAT_VERSION:
        fault = Fault("format_version", version, f"must be {FORMAT_VERSION}; this program reads no other")
        raise UserError(f"breaks a rule: {fault}")
    checksum = values.pop(CHECKSUM_KEY, None)
    try:
        # Through JSON, because pydantic's strict mode takes lists for tuples from JSON only.
        manifest = Manifest.model_validate_json(json.dumps(values))
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        more = f" (and {len(others)} more faults)" if others else ""
        raise UserError(f"breaks a rule: {_as_fault(first)}{more}") from error
    expected = _checksum_of(values)
    if checksum != expected:
        fault = Fault(
            CHECKSUM_KEY, checksum, f"the rest of the file has {expected}: it has changed since it was written"
        )
        raise UserError(f"is damaged: {fault}")
    return manifest


def _as_fault(error: ErrorDetails) -> Fault:
    is_of_a_whole_section = error["type"] in ("missing", "manifest")
    value = NO_VALUE if is_of_a_whole_section else error["input"]
    # "Input should be at most 4" reads as advice.
    message = _PHRASES.get(error["type"]) or re.sub(r"^\w+ should", "must", error["msg"])
    # pydantic marks the name of an entry itself, in contrast to its value.
    path = dotted(error["loc"]).removesuffix(".[key]")
    return Fault(path, value, message.replace(" after validation", ""))


_PHRASES: Final = {"missing": "is required", "extra_forbidden": "unknown key; remove it"}
"""pydantic's error type -> the phrase, where its own words are not ours."""


def _checksum_of(values: dict[str, Any]) -> str:
    return xxh3_128_hexdigest(_canonical(values).encode("ascii"))


def _canonical(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def _as_text(values: dict[str, Any]) -> str:
    """Write a key of the object on each line: a person finds the short ones among thousands of pieces."""
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def step_in_name(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder, with or without a suffix; None for another name."""
    # Ten digits are enough for any run, and more would be a number that nothing shows.
    match = re.match(r"step_([0-9]{8,10})(\.|\Z)", name)
    return int(match[1]) if match else None
