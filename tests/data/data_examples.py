"""Small corpora and the settings that read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megastable.config import DataConfig, ModelConfig
from megastable.data import Corpus, prepare_corpus

DOCUMENTS = {f"part{index % 3}/doc{index:02}.txt": f"document {index}: {'äb' * (index + 1)}\n" for index in range(20)}


def write_documents(folder: Path, documents: Mapping[str, str] = DOCUMENTS) -> Path:
    """Write each text to its name under ``folder``, which is returned."""
    for name, text in documents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", newline="")
    return folder


def text_data(path: Path, cache_dir: Path, **changes: Any) -> DataConfig:
    """Make settings that read text files as bytes, with ``changes``."""
    settings: dict[str, Any] = {
        "source": {"type": "text", "path": str(path)},
        "tokenizer": {"type": "bytes"},
        "validation_fraction": 0.2,
        "cache_dir": str(cache_dir),
    }
    return DataConfig(**(settings | changes))


def tiny_model(**changes: Any) -> ModelConfig:
    """Make a model of 8-token samples and room for the byte tokenizer, with ``changes``."""
    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "seq_length": 8,
        "vocab_size": 300,
    }
    return ModelConfig(**(settings | changes))


def prepare_single(data: DataConfig, model: ModelConfig, *, show_progress: bool = False) -> Corpus:
    """Prepare the corpus of a source that is no blend."""
    corpus = prepare_corpus(data, model, show_progress=show_progress)
    assert isinstance(corpus, Corpus)
    return corpus
