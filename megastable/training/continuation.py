"""What may differ between a checkpoint and the run that continues it, and what is said of the differences.

What follows from the tensors and the tokens themselves decides: any layout and precision continues a checkpoint, and
any file that the same tokens come from will do. What is fixed by habit alone, so that no run changes it by mistake, may
change where ``--allow-change`` names it. What the weights are of, the model, never changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from megastable.checkpoints.folder import step_folders, step_of
from megastable.checkpoints.manifest import NO_CORPUS, Manifest
from megastable.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from megastable.config.run_config import differences, run_as_dict
from megastable.config.section import Section
from megastable.core.errors import UserError
from megastable.core.layout import ParallelLayout
from megastable.core.model_parts import POSITION_KINDS
from megastable.core.records import Event, TrainingState

MODEL = "megastable.model"
DATA = "megastable.data"

MODEL_ITSELF = (
    "activation",
    "embedding_norm",
    "ffn_hidden_size",
    "hidden_size",
    "linear_biases",
    "norm",
    "num_attention_heads",
    "num_key_value_heads",
    "num_layers",
    "parallel_residual",
    "position_embedding",
    "qk_norm",
    "tie_embeddings",
    "vocab_size",
)
"""Keys of the model that say which weights there are and what each of them is for."""
MODEL_HABITS = (
    "attention_logit_cap",
    "dropout",
    "norm_eps",
    "output_logit_cap",
    "rotary_base",
    "rotary_fraction",
    "seq_length",
)
"""Keys of the model that leave the weights as they are, and change what is computed with them."""
MODEL_FREE = ("attention", "compile", "family", "vocab_padding_multiple")
"""Keys of the model that only say how the same is computed, or what it is called."""
SAME_MEANING = {"ffn_hidden_size": "ffn_size", "num_key_value_heads": "kv_heads"}
"""Key of the model -> the property in which two models have to agree, however it is written."""

ALLOWABLE = (
    DATA,
    f"{DATA}.packing",
    f"{DATA}.validation_fraction",
    "megastable.init",
    "megastable.training.seed",
    *(f"{MODEL}.{key}" for key in MODEL_HABITS),
)
"""What is fixed by habit, as ``--allow-change`` names it. ``DATA`` as a whole is another text."""
SAMPLE_KEYS = (f"{MODEL}.seq_length", f"{DATA}.packing", f"{DATA}.validation_fraction")
"""Keys that make other samples of the same tokens."""
TOKENS_DECIDE = (f"{DATA}.source", f"{DATA}.tokenizer", f"{DATA}.cache_dir")
"""Keys of the data that say where tokens come from; the tokens are compared once they are there."""


class Change(NamedTuple):
    """A difference between a checkpoint and the run that continues it."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"changed since the checkpoint: {self.key} was {self.old!r}, is {self.new!r}"


def check_allowable(keys: Sequence[str]) -> None:
    """Check what ``--allow-change`` names.

    Raises:
        UserError: a key is of the model itself, or is none that is fixed by habit; the legal ones are listed.
    """
    for key in keys:
        name = key.removeprefix(f"{MODEL}.")
        if name in MODEL_ITSELF or key == MODEL:
            raise UserError(
                f"--allow-change {key}: the weights of a checkpoint are of the model that it was trained with, which "
                "nothing allows to change"
            )
        if not _is_within(key, ALLOWABLE):
            raise UserError(f"--allow-change {key}: must be one of {', '.join(ALLOWABLE)}; others need no permission")


def check_continues(
    manifest: Manifest, run: RunConfig, layout: ParallelLayout, allowed: Sequence[str], warn: Callable[[str], None]
) -> None:
    """Check that ``run`` on ``layout`` continues the checkpoint, and warn of all that has changed.

    The tokens are left to ``check_same_corpus``.

    Args:
        allowed: keys of ``ALLOWABLE`` that may have changed.

    Raises:
        UserError: the model is another, or a key has changed that is fixed by habit; all of them are named.
    """
    faults = []
    for change in changes(manifest, run, layout):
        fault = _fault_of(change, manifest, run, allowed)
        if fault is None:
            warn(str(change))
        else:
            faults.append(f"  {change.key}: {change.old!r} in the checkpoint, {change.new!r} now; {fault}")
    for text in _too_late(manifest, run):
        warn(text)
    if faults:
        raise UserError("This run cannot continue the checkpoint:\n" + "\n".join(faults))


def check_same_corpus(
    manifest: Manifest, fingerprint: str, allowed: Sequence[str], warn: Callable[[str], None]
) -> None:
    """Refuse to continue a checkpoint on other data: token ids and sample order would mean something else.

    Where that is allowed, warn of it.

    Args:
        fingerprint: of the tokens that the run has.
        allowed: keys of ``ALLOWABLE`` that may have changed.

    Raises:
        UserError: the tokens or their split are not those that the checkpoint was trained on.
    """
    change = _change_of_tokens(manifest, fingerprint)
    if change is None:
        return
    if not any(_is_within(key, (DATA,)) for key in allowed):
        raise UserError(
            "This run cannot continue the checkpoint: the tokenised corpus of megastable.data is not the one it was "
            "trained on. Text files, tokenizer or (for the source stdlib) Python have changed since. To go on with "
            f"this one: --allow-change {DATA}"
        )
    warn(str(change))


def changes(manifest: Manifest, run: RunConfig, layout: ParallelLayout) -> Iterator[Change]:
    """Yield what differs between the checkpoint and the ``run`` on ``layout`` that continues it, but for the tokens."""
    # Stages and tensor ranks are keys of the run file; the replicas are what a launch leaves for them.
    if manifest.layout.data_parallel_size != layout.data_parallel_size:
        yield Change("data_parallel_size", manifest.layout.data_parallel_size, layout.data_parallel_size)
    yield from (Change(*difference) for difference in differences(_with_later_keys(manifest.run), run_as_dict(run)))


def _too_late(manifest: Manifest, run: RunConfig) -> Iterator[str]:
    """Say of every range of samples that the run file leaves out only now how much of it the run is past."""
    sections: Any = manifest.run.get("megastable", {})
    before = [tuple(each) for each in sections.get("training", {}).get("skip_samples", ())]
    position = manifest.state.to_training_state().data_position
    for first, after in run.megastable.training.skip_samples:
        if (first, after) not in before and first < position:
            how_much = "all" if after <= position else f"the first {position - first:,}"
            yield (
                f"megastable.training.skip_samples: the run is at sample {position:,} of the order already, past "
                f"{how_much} of [{first}, {after}], and what it has read is not taken back; an older checkpoint is "
                "before it"
            )


def _with_later_keys(old: dict[str, Any]) -> dict[str, Any]:
    """Give a checkpoint's run the keys of model and data that came after it, which it had at their defaults."""
    sections = old.get("megastable", {})
    filled = {
        name: {**_defaults(kind), **sections[name]}
        for name, kind in (("model", ModelConfig), ("data", DataConfig))
        if name in sections
    }
    return {**old, "megastable": {**sections, **filled}} if filled else old


def _defaults(kind: type[Section]) -> dict[str, Any]:
    """Return the plain defaults of a section; a key that is null is left out by every version."""
    return {
        name: field.default
        for name, field in kind.model_fields.items()
        if not field.is_required() and field.default_factory is None and field.default is not None
    }


def nothing_left(checkpoint: Path, state: TrainingState, training: TrainingConfig) -> str | None:
    """Say that the run had taken all its steps when the checkpoint was written; None where steps are left."""
    if training.goes_on(state.step, state.consumed_samples):
        return None
    if training.total_steps is not None:
        length = "total_steps"
        how_far = f"at step {state.step:,}, and the run has {training.total_steps:,} steps"
    else:
        length = "total_samples"
        how_far = f"at sample {state.consumed_samples:,}, and the run has {training.total_samples:,} samples"
    advice = f"to train on, raise megastable.training.{length}"
    return f"nothing to do: {checkpoint} is {how_far}. Nothing was changed; {advice}"


def reads_the_same(manifest: Manifest, run: RunConfig, fingerprint: str) -> bool:
    """Tell whether losses of ``run`` can be compared with those before the checkpoint: same tokens, in same samples.

    Args:
        fingerprint: of the tokens that the run has.
    """
    changed = {key for key, _, _ in differences(_with_later_keys(manifest.run), run_as_dict(run))}
    return manifest.corpus_fingerprint == fingerprint and changed.isdisjoint(SAMPLE_KEYS)


def events_of_resume(
    checkpoint: Path, manifest: Manifest, run: RunConfig, layout: ParallelLayout, fingerprint: str, own_folder: Path
) -> Iterator[Event]:
    """Yield the event that ``run`` goes on from ``checkpoint``, one for all that has changed since, and one for every
    newer checkpoint that was passed over.

    Args:
        fingerprint: of the tokens that the run has.
        own_folder: of the run's checkpoints; one of another folder was named, whatever is newer there.
    """
    state = manifest.state

    def event(kind: str, text: str, **data: Any) -> Event:
        return Event(state.step, state.consumed_samples, kind, text, data)

    yield event("resume", f"goes on from {checkpoint} at step {state.step}", checkpoint=str(checkpoint))
    for change in (*changes(manifest, run, layout), _change_of_tokens(manifest, fingerprint)):
        if change is not None:
            yield event("changed", str(change), key=change.key, old=change.old, new=change.new)
    for text in _too_late(manifest, run):
        yield event("warning", text)
    if checkpoint.parent == own_folder:
        for newer in step_folders(own_folder):
            if step_of(newer) > state.step:
                text = f"{newer} is newer, and not complete or saved in a row of skipped steps"
                yield event("passed_over", text, checkpoint=str(newer))


def _change_of_tokens(manifest: Manifest, fingerprint: str) -> Change | None:
    # An imported model has consumed no tokens of ours: there is no place in them to go on from.
    if manifest.corpus_fingerprint in (fingerprint, NO_CORPUS):
        return None
    return Change(f"{DATA} (its tokens)", manifest.corpus_fingerprint, fingerprint)


def _fault_of(change: Change, manifest: Manifest, run: RunConfig, allowed: Sequence[str]) -> str | None:
    """Say why a change is refused; None where it is free or allowed."""
    if _is_of_the_model_itself(change.key, manifest.run, run):
        return "the weights are of the model that they were trained with"
    fixed = [key for key in ALLOWABLE if _is_within(change.key, (key,)) or key.startswith(f"{change.key}.")]
    if not fixed or _is_within(change.key, TOKENS_DECIDE) or _is_within(change.key, allowed):
        return None
    return f"--allow-change {fixed[-1]} allows it"


def _is_of_the_model_itself(key: str, old: dict[str, Any], run: RunConfig) -> bool:
    name = key.removeprefix(f"{MODEL}.")
    model = run.megastable.model
    # Where one of the two runs lacks a section as a whole, that is what differs.
    if name == "seq_length":
        return POSITION_KINDS[model.position_embedding].has_table
    if key in ("megastable", MODEL):
        return True
    if name not in MODEL_ITSELF:
        return False
    if name not in SAME_MEANING:
        return True
    try:
        # Through JSON text, in which a list may stand for a tuple: the sections are strict about types.
        before = ModelConfig.model_validate_json(json.dumps(old["megastable"]["model"]))
    except ValidationError:  # of another version
        return True
    return getattr(before, SAME_MEANING[name]) != getattr(model, SAME_MEANING[name])


def _is_within(key: str, sections: Sequence[str]) -> bool:
    """Tell whether ``key`` is one of ``sections``, or lies in one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)
