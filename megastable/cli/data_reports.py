"""What the commands about data print, for people and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megastable.cli.tables import ABSENT, as_json, significant, whole
from megastable.core.errors import UserError, shown

if TYPE_CHECKING:
    from megastable.data import BlendedCorpus, Corpus
    from megastable.data.build import Built
    from megastable.data.inspection import Inspection

MOST_FAULTS_SHOWN = 5


def print_built(built: Built, json_wanted: bool) -> None:
    """Print what was built, and what was left out of it."""
    meta = built.meta
    tokens = meta.num_train_tokens + meta.num_validation_tokens
    if json_wanted:
        document = {
            "prefix": str(built.prefix),
            "validation_prefix": built.validation_prefix and str(built.validation_prefix),
            "documents": meta.num_documents,
            "empty_documents": built.num_empty_documents,
            "broken_documents": len(built.broken),
            "tokens": tokens,
            "vocab_size": meta.vocab_size,
            "eod_id": meta.eod_id,
            "broken": list(built.broken),
        }
        print(as_json(document))
        return
    pairs = str(built.prefix)
    if built.validation_prefix is not None:
        pairs += f" ({whole(meta.num_train_tokens)} tokens) and {built.validation_prefix}"
    print(shown(f"wrote {pairs}: {whole(tokens)} tokens of {whole(meta.num_documents)} documents"))
    if built.num_empty_documents:
        print(shown(f"left out {_documents(built.num_empty_documents)} without text: see {built.prefix}.empty.jsonl"))
    print_broken(built.broken)
    if built.broken:
        print(shown(f"all are listed in {built.prefix}.broken.jsonl"))


def print_broken(faults: Sequence[str]) -> None:
    """Print how many documents were left out because they cannot be read, and the first few of them."""
    if not faults:
        return
    print(f"left out {_documents(len(faults))} that cannot be read:")
    for fault in faults[:MOST_FAULTS_SHOWN]:
        print(f"  {shown(fault)}")


def _documents(count: int) -> str:
    return "1 document" if count == 1 else f"{whole(count)} documents"


def print_corpus(corpus: Corpus | BlendedCorpus, json_wanted: bool) -> None:
    """Print what the cache of a run file has."""
    sources: Mapping[str, tuple[float, Corpus]] = corpus.parts
    if json_wanted:
        document: dict[str, Any] = {
            "train_tokens": corpus.num_train_tokens,
            "validation_tokens": corpus.num_validation_tokens,
            "vocab_size": corpus.vocab_size,
            "eod_id": corpus.eod_id,
            "fingerprint": corpus.fingerprint,
            "tokenizer": str(corpus.tokenizer_path),
            "sources": {
                name: {"share": share, "train_tokens": part.num_train_tokens} for name, (share, part) in sources.items()
            },
        }
        print(as_json(document))
        return
    print(
        f"the cache has {whole(corpus.num_train_tokens)} training and {whole(corpus.num_validation_tokens)} validation "
        f"tokens of a vocabulary of {whole(corpus.vocab_size)}"
    )
    for name, (share, part) in sources.items():
        print(f"  {name}: {share:.2%} of the samples, {whole(part.num_train_tokens)} training tokens")
    print(shown(f"tokenizer: {corpus.tokenizer_path}"))


def print_inspection(found: Inspection, document: int | None, text: str | None, json_wanted: bool) -> None:
    """Print what is known of a pair, and the begin of one document where that was asked for."""
    if json_wanted:
        values = dataclasses.asdict(found)
        print(as_json({**values, "faults": found.faults, "document": document, "text": text}))
        return

    def count(value: int | None) -> str:
        return ABSENT if value is None else whole(value)

    lines = {
        "documents": f"{whole(found.documents)}, {whole(found.empty_documents)} empty, "
        f"{whole(found.duplicate_documents)} equal to an earlier one ({whole(found.duplicate_tokens)} tokens)",
        "tokens": f"{whole(found.tokens)} of {found.dtype}",
        "tokens a document": f"{whole(found.shortest)} to {whole(found.longest)}, median {whole(found.median)}, mean "
        f"{significant(found.mean)}, 95% have at most {whole(found.p95)}",
        "ids": f"{count(found.smallest_id)} to {count(found.largest_id)}, vocabulary {count(found.vocab_size)}",
        "not ended": f"{count(found.not_ended)} documents do not end with the end-of-document id",
    }
    if found.not_ended is None:
        lines["not ended"] = "not known: there is no record beside the pair"
    width = max(map(len, lines))
    print(shown(found.prefix))
    for name, line in lines.items():
        print(f"  {name:<{width}}  {line}")
    for fault in found.faults:
        print(f"  {fault}")
    if text is not None:
        print(f"document {document}: {text}")


@contextmanager
def naming_options() -> Iterator[None]:
    """Let the errors of a source name the options of a command in place of the keys of a run file."""
    try:
        yield
    except UserError as error:
        raise UserError(with_options(str(error))) from error


def with_options(text: str) -> str:
    """Put options in the place of the keys of a run file."""
    for key, option in (
        ("megastable.data.source.path: ", ""),
        ("megastable.data.source.text_key", "--text-key"),
        ("megastable.data.source.text_column", "--text-key"),
        ("megastable.data.source.split", "--split"),
        ("megastable.data.source: ", ""),
    ):
        text = text.replace(key, option)
    return text
