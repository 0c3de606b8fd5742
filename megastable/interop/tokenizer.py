"""Finding the tokenizer of a checkpoint, and opening it: data, and never code."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from megastable.checkpoints.tokenizer_files import read_tokenizer_files, tokenizer_of
from megastable.core.errors import UserError, first_line
from megastable.data.token_store import TOKENIZER_FOLDER
from megastable.interop.held_out_text import cached_corpus
from megastable.interop.saved_model import SavedModel


def find_tokenizer(saved: SavedModel, given: Path | None) -> dict[str, bytes]:
    """Return the files of the checkpoint's tokenizer, by their names.

    They are those that travel with it; of a checkpoint that was written without, those of the cache of its tokens.

    Args:
        given: a folder to take instead.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    try:
        if given is not None:
            return _files_of(open_tokenizer_folder(given))
        files = tokenizer_of(saved.checkpoint, saved.manifest)
        cached = None if files else cached_corpus(saved)
        if cached is not None:
            files = read_tokenizer_files(cached / TOKENIZER_FOLDER)
    except OSError as error:
        raise UserError(f"the tokenizer cannot be read: {error.filename}: {error.strerror}") from error
    if not files:
        raise UserError(
            f"{saved.checkpoint} has no tokenizer beside its tensors, and the cache of its tokens is not here; name "
            "the folder of the tokenizer with --tokenizer"
        )
    return files


def _files_of(tokenizer: Any) -> dict[str, bytes]:
    # Written anew: beside a tokenizer, a folder may have whatever else belongs to a model.
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return read_tokenizer_files(Path(folder))


def open_tokenizer(files: dict[str, bytes]) -> Any:
    """Open a tokenizer as ``transformers`` does.

    Raises:
        UserError: the package finds none in the files.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return open_tokenizer_folder(Path(folder))


def open_tokenizer_folder(folder: Path) -> Any:
    """Open the tokenizer in a folder.

    Raises:
        UserError: the package finds none in it.
    """
    # Imported here, because it takes seconds.
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name one with the files of a tokenizer")
    try:
        # False, and not left out: then transformers asks on the terminal whether to run a folder's own code.
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # broken files raise errors of many types
        raise UserError(f"transformers opens no tokenizer in {folder}: {first_line(error)}") from error


def check_tokenizer_fits(tokenizer: Any, saved: SavedModel) -> None:
    """Refuse a tokenizer with ids that the model has no row for.

    Raises:
        UserError: it is of another model.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= saved.model.vocab_size:
        raise UserError(
            f"the tokenizer has the id {largest:,}, and the model of {saved.checkpoint} has {saved.model.vocab_size:,} "
            "tokens (megastable.model.vocab_size); name the folder of its own tokenizer with --tokenizer"
        )
