"""Tokenizers of the ``tokenizers`` package over bytes: making an empty one, and saving it for ``transformers``."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256


def byte_level(model: models.BPE) -> Tokenizer:
    """Make a tokenizer that writes every byte as a printable character and loses nothing, spaces included."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_characters() -> list[str]:
    """List the printable character by which byte-level tokenizers write each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    # A printable byte stands for itself. The others, in order, get the characters from 256 on.
    code_points = {byte: byte for byte in printable}
    code_points |= {byte: NUM_BYTES + index for index, byte in enumerate(others)}
    return [chr(code_points[byte]) for byte in range(NUM_BYTES)]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer of the ``tokenizers`` package so that ``transformers`` opens it with the same end token."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
