"""What lies beside a pair that was built here: its tokenizer, its record and the checksums of its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megastable.core.errors import UserError
from megastable.data.block_checksums import BlockChecksums
from megastable.data.indexed_format import IndexedTokens, tokens_path
from megastable.data.indexed_writer import checksums_path
from megastable.data.token_store import META_FILE, TOKENIZER_FOLDER, TokenStoreMeta, read_meta


def meta_path(prefix: Path) -> Path:
    """Return where the record of a pair that was built here is; pairs of other tools have none."""
    return prefix.with_name(f"{prefix.name}.json")


def tokenizer_path(prefix: Path) -> Path:
    """Return the folder of the tokenizer of a pair that was built here."""
    return prefix.with_name(f"{prefix.name}.tokenizer")


def checksums_beside(pair: IndexedTokens) -> BlockChecksums | None:
    """Open the checksums of a pair's tokens; None of one of a tool that writes none.

    Raises:
        UserError: they are those of another file.
    """
    path = checksums_path(pair.prefix)
    if not path.is_file():
        return None
    try:
        return BlockChecksums(pair.tokens, path)
    except ValueError as error:
        raise UserError(f"the checksums beside {tokens_path(pair.prefix)} are not its own: {error}") from error


def tokenizer_beside(prefix: Path) -> Path | None:
    """Find the tokenizer that made a pair: beside it, or in the folder of the cache that it is in; None without one."""
    folders = (tokenizer_path(prefix), tokenizer_path(_built_with(prefix)), prefix.parent / TOKENIZER_FOLDER)
    return next((folder for folder in folders if folder.is_dir()), None)


def same_vocabulary(first: Path, second: Path) -> bool | None:
    """Tell whether the tokenizers of two folders have the same tokens and merges; None where that cannot be known.

    Not by the bytes of their files, which differ with the version of the library that wrote them.
    """
    vocabularies = [_vocabulary(folder) for folder in (first, second)]
    return None if None in vocabularies else vocabularies[0] == vocabularies[1]


def _vocabulary(folder: Path) -> tuple[Any, Any] | None:
    """Read tokens and merges; None of a tokenizer that is saved in another way."""
    try:
        model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        # A merge is a pair, or both joined by a space.
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
        return model["vocab"], merges
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def record_beside(prefix: Path) -> TokenStoreMeta | None:
    """Read the record of a pair, or that of the cache's folder that it is in; None where there is none.

    Raises:
        UserError: it is damaged.
    """
    paths = (meta_path(prefix), meta_path(_built_with(prefix)), prefix.parent / META_FILE)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    try:
        return read_meta(path)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is no record of a pair ({error})") from error


def _built_with(prefix: Path) -> Path:
    """Return the pair that a pair of validation documents was built with."""
    return prefix.with_name(prefix.name.removesuffix(".validation"))
