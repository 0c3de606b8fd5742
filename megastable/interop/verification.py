"""Compares an exported model with ours: the same tokens through both, in fp32, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from megastable.core.errors import EXIT_CODE_FAILURE, UserError, first_line
from megastable.core.memory import GIB
from megastable.interop.held_out_text import held_out_text
from megastable.interop.one_process import load_model
from megastable.interop.progress import Progress
from megastable.interop.saved_model import SavedModel

LARGEST_DIFFERENCE = 1e-4
"""Of two logits, where the largest is 1 or less; of larger ones the same share, since fp32 itself loses that much."""
COPIES = 3
"""Both models, and as much again for tensors on their way and activations."""


class DifferentLogitsError(UserError):
    """An exported model that does not compute what ours does."""

    exit_code = EXIT_CODE_FAILURE


def wants_verification(saved: SavedModel, asked: bool | None, progress: Progress) -> bool:
    """Decide whether both models are loaded: as asked, or else where they fit into the memory that is free."""
    if asked is not None:
        if not asked:
            progress.note("not verified: --no-verify")
        return asked
    weights = sum(_num_elements(record.shape) for record in saved.manifest.tensors.values())
    needed = COPIES * torch.float32.itemsize * weights
    free = psutil.virtual_memory().available
    if needed <= free:
        return True
    progress.note(
        f"not verified: both models would take about {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free; "
        "--verify compares them all the same"
    )
    return False


def _num_elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def check_same_logits(saved: SavedModel, exported: Path, dtype: torch.dtype, progress: Progress) -> None:
    """Compare the logits of both models, and say how much they differ.

    Ours has its weights rounded to the exported format as well, so that one bound holds for all formats: what is
    compared is the model and not the rounding.

    Raises:
        DifferentLogitsError: they differ by more than fp32 explains, or the exported model cannot be loaded.
    """
    text = held_out_text(saved)
    advance = progress.begin("comparing the logits", 2)
    theirs = _their_logits(exported, text.token_ids)
    advance(1)
    with torch.no_grad():
        ours = load_model(saved, dtype)(text.token_ids)
    advance(1)
    largest = float(ours.abs().max())
    bound = LARGEST_DIFFERENCE * max(1.0, largest)
    difference = float((ours - theirs).abs().max())
    said = (
        f"largest difference of a logit {difference:.2g}, bound {bound:.2g} (largest logit {largest:.3g}), "
        f"on {text.name}"
    )
    # Not the other way round: a difference that is no number is one.
    if not difference <= bound:
        raise DifferentLogitsError(f"the exported model computes something else: {said}; nothing was exported")
    progress.note(f"verified: {said}")


def _their_logits(exported: Path, token_ids: torch.Tensor) -> torch.Tensor:
    """Compute logits (samples, tokens, vocabulary) with the class of ``transformers``, from the files alone."""
    # Imported here, because it takes seconds.
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a second bar would break ours
    try:
        # Its types do not know of the pair that the last argument asks for.
        load: Any = AutoModelForCausalLM.from_pretrained
        model, info = load(
            str(exported), dtype=torch.float32, trust_remote_code=False, local_files_only=True, output_loading_info=True
        )
    except Exception as error:
        raise DifferentLogitsError(f"transformers cannot load the exported model: {first_line(error)}") from error
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        raise DifferentLogitsError(f"transformers loads the exported model in part only: {wrong}")
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(token_ids).logits
    return logits
