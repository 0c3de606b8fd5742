"""``megastable data`` and ``megastable tokenizer``: tokens from documents, before a run and apart from one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megastable.cli.data_reports import (
    naming_options,
    print_broken,
    print_built,
    print_corpus,
    print_inspection,
    with_options,
)
from megastable.cli.tables import as_json, whole
from megastable.config import load_run_file
from megastable.config.limits import LARGEST_VOCABULARY
from megastable.core.errors import UserError, shown
from megastable.core.host import usable_cpus
from megastable.core.user_paths import expanded, pair_prefix

# Nothing here loads numpy before it is needed: every command of megastable imports this file.

data_app = typer.Typer(
    help="Make, look at and join tokens in Megatron's indexed format (.bin and .idx).", no_args_is_help=True
)
tokenizer_app = typer.Typer(help="Make tokenizers.", no_args_is_help=True)


class FormatName(StrEnum):
    """The formats that --format takes."""

    text = "text"
    jsonl = "jsonl"
    parquet = "parquet"
    arrow = "arrow"
    csv = "csv"
    dataset = "dataset"


class Broken(StrEnum):
    """What is done about a document that cannot be read."""

    stop = "stop"
    skip = "skip"


FormatOption = Annotated[
    FormatName | None,
    typer.Option("--format", help="format of INPUT; default: by the names of its files", show_default=False),
]
TextKey = Annotated[
    str | None, typer.Option(help="key of a JSON line, or column of a table, that holds the text; default: text")
]
PromptKey = Annotated[
    str | None, typer.Option(help="key of a prompt in JSON lines, which is read and not learned; with --completion-key")
]
CompletionKey = Annotated[str | None, typer.Option(help="key of the completion that is learned after the prompt")]
DatasetName = Annotated[str | None, typer.Option("--name", help="configuration of a dataset that has several")]
Split = Annotated[str | None, typer.Option(help="split of a dataset; default: train")]
BrokenOption = Annotated[
    Broken, typer.Option(help="what to do about a document that cannot be read: stop, or skip and list it")
]
Output = Annotated[
    str | None,
    typer.Option("--output", "-o", help="the pair to write: OUTPUT.bin and OUTPUT.idx; leave it out for a run file"),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", "-t", help="a folder or hub name that transformers loads, or bytes; with --output only"
    ),
]
Workers = Annotated[
    int | None, typer.Option(min=1, max=1024, help="processes that encode; default: one a core", show_default=False)
]


@data_app.command()
def build(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="a file, folder, glob or dataset; or a run file, without --output")
    ],
    output: Output = None,
    tokenizer: TokenizerName = None,
    input_format: FormatOption = None,
    text_key: TextKey = None,
    prompt_key: PromptKey = None,
    completion_key: CompletionKey = None,
    name: DatasetName = None,
    split: Split = None,
    validation_fraction: Annotated[
        float, typer.Option(min=0, max=0.99, help="share of the documents for a second pair, OUTPUT.validation")
    ] = 0.0,
    broken: BrokenOption = Broken.stop,
    workers: Workers = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="override a key of the run file by its path; repeatable"),
    ] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="print one object instead of lines")] = False,
) -> None:
    """Tokenise documents: into a pair of Megatron's indexed format, or into the cache of a run file.

    megastable data build corpora/web -o tokens/web -t my_tokenizer

    reads a folder of text, .jsonl (also .gz and .zst), .parquet, .arrow or
    .csv files, or whatever `datasets` opens, and writes tokens/web.bin and
    tokens/web.idx, with the tokenizer (tokens/web.tokenizer), a record
    (tokens/web.json) and checksums (tokens/web.crc32) beside them. A run
    reads it with {"type": "indexed", "path": "tokens/web"}, and so do
    Megatron's own tools.

    megastable data build ds_configs/quickstart.json

    makes the cache that a run of this file would make at its start, so that
    no machine of a cluster waits for one that tokenises.

    The files are the same for any number of --workers. A build that was ended
    goes on where it was when it is started again. Every document ends with the
    tokenizer's end-of-document id; those without text are left out, counted
    and listed in OUTPUT.empty.jsonl. Nothing is overwritten.

    --broken skip leaves out documents that cannot be read, such as a line that
    is not JSON or the rest of a .gz file that was cut, counts them, and lists each with its file and line in
    OUTPUT.broken.jsonl.

    Exit code 0 when all is written, 2 where something is refused.
    """
    num_workers = workers or usable_cpus()
    if output is None:
        of_input = (tokenizer, input_format, text_key, prompt_key, completion_key, name, split)
        if any(given is not None for given in of_input) or validation_fraction or broken is not Broken.stop:
            raise UserError(
                "--tokenizer, --format, --text-key, --prompt-key, --completion-key, --name, --split, "
                "--validation-fraction and --broken go with --output; without it INPUT is a run file, which says all "
                "that itself"
            )
        _build_cache(Path(source), overrides or [], num_workers, json_wanted)
        return
    if tokenizer is None:
        raise UserError("--tokenizer: is required with --output; legal are a folder, a name on the hub, and bytes")
    if overrides:
        raise UserError("--set: goes with a run file; leave out --output to build the cache of one")
    from megastable.data.build import build_pair
    from megastable.data.inputs import Input, open_input
    from megastable.data.text_tokenizers import named_tokenizer

    prefix = pair_prefix(output, "--output")
    made = named_tokenizer(tokenizer, "--tokenizer")
    with naming_options():
        given = Input(source, text_key, name, split, prompt_key, completion_key, broken is Broken.skip)
        opened = open_input(given, input_format and input_format.value)
        built = build_pair(
            opened.documents,
            made,
            prefix,
            has_prompts=prompt_key is not None,
            validation_fraction=validation_fraction,
            skip_broken=broken is Broken.skip,
            num_workers=num_workers,
            show_progress=True,
            options=opened.options,
            reworded=with_options,
        )
    print_built(built, json_wanted)


def _build_cache(path: Path, overrides: list[str], num_workers: int, json_wanted: bool) -> None:
    run = load_run_file(path, overrides)
    from megastable.data import prepare_corpus

    settings = run.megastable
    corpus = prepare_corpus(settings.data, settings.model, show_progress=True, num_workers=num_workers)
    print_corpus(corpus, json_wanted)


Pair = Annotated[str, typer.Argument(metavar="PAIR", help="a pair without .bin and .idx, e.g. tokens/web")]


@data_app.command()
def inspect(
    pair: Pair,
    document: Annotated[int | None, typer.Option(min=0, help="show the begin of this document as text")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", "-t", help="folder of the tokenizer; default: the one beside the pair"),
    ] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="print one object instead of lines")] = False,
) -> None:
    """Look at tokens: how many, how long the documents are, which are equal, and what stands in one.

    Sizes, offsets and documents are checked as a run does when it opens the
    pair, and all ids are read. Equal documents are counted by a hash of their
    ids. Where a record lies beside the pair, as `data build` writes it, the
    ids are held against its vocabulary and its end-of-document id; where
    checksums do, the tokens are compared with them.

    --document N shows the first tokens of document N (counting from 0),
    control characters as escapes.

    Works on the cache of a run too: CACHE/tokens/.../train.

    Exit code 1 where a run would refuse the ids or tokens, 0 without, 2 where the pair
    cannot be read.
    """
    from megastable.data.inspection import decoded_document, inspect_pair

    prefix = pair_prefix(pair, "PAIR")
    found = inspect_pair(prefix, show_progress=True)
    text = None if document is None else decoded_document(prefix, document, tokenizer)
    print_inspection(found, document, text, json_wanted)
    if found.faults:
        raise typer.Exit(1)


@data_app.command()
def merge(
    pairs: Annotated[list[str], typer.Argument(metavar="PAIR...", help="pairs without .bin and .idx, in order")],
    output: Annotated[str, typer.Option("--output", "-o", help="the pair to write")],
    json_wanted: Annotated[bool, typer.Option("--json", help="print one object instead of a line")] = False,
) -> None:
    """Join pairs to one, with the documents of the first one first.

    The result is byte for byte that of Megatron's merge_datasets. Pairs whose
    ids are of different width, or that have different tokenizers beside them,
    are refused. Nothing is overwritten. To read several pairs by weight, leave
    them as they are and write a blend into the run file.
    """
    from megastable.data.merging import merge_pairs

    prefix = pair_prefix(output, "--output")
    merged = merge_pairs([pair_prefix(pair, "PAIR") for pair in pairs], prefix, show_progress=True)
    if json_wanted:
        print(as_json({"prefix": str(prefix), "documents": merged.num_documents, "tokens": len(merged.tokens)}))
        return
    print(f"wrote {shown(str(prefix))}: {whole(merged.num_documents)} documents, {whole(len(merged.tokens))} tokens")


@tokenizer_app.command()
def train(
    source: Annotated[str, typer.Argument(metavar="INPUT", help="a file, folder, glob or dataset to learn from")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the folder to write")],
    vocab_size: Annotated[
        int,
        typer.Option(
            min=257, max=LARGEST_VOCABULARY, help="tokens, the 256 bytes and the end of a document among them"
        ),
    ],
    input_format: FormatOption = None,
    text_key: TextKey = None,
    name: DatasetName = None,
    split: Split = None,
    broken: BrokenOption = Broken.stop,
) -> None:
    """Train a byte-level BPE, which encodes any text and loses nothing.

    megastable tokenizer train corpora/web -o my_tokenizer --vocab-size 32000

    learns from the first 32 million characters, of documents in a mixed order
    (of JSON lines the first ones), in about 15 seconds on one core. The folder
    is one that transformers.AutoTokenizer loads; its end-of-document token is
    <|endoftext|>. Use it with `data build --tokenizer`, or in a run file with
    {"type": "transformers", "path": "my_tokenizer"}.

    INPUT is as for `data build`. Nothing is overwritten.
    """
    import numpy as np

    from megastable.data.corpus import note_remarks, texts_to_learn_from
    from megastable.data.inputs import Input, ReadableDocuments, open_input
    from megastable.data.text_tokenizers import train_bpe

    folder = expanded(output)
    if folder.exists():
        raise UserError(f"--output: {folder} exists, and nothing is overwritten; remove it, or name another folder")
    with naming_options():
        given = open_input(
            Input(source, text_key, name, split, skip_broken=broken is Broken.skip), input_format and input_format.value
        )
        note_remarks(given.documents, show=True)
        documents = ReadableDocuments(given.documents) if broken is Broken.skip else given.documents
        texts = texts_to_learn_from(documents, np.arange(len(documents)), in_order=given.reads_in_order)
        made = train_bpe(vocab_size, texts)
    folder.mkdir(parents=True)
    made.save(folder)
    # A short text has fewer words to learn than were asked for.
    fewer = f" (asked for {whole(vocab_size)}: the text has no more)" if made.vocab_size < vocab_size else ""
    print(f"wrote {shown(str(folder))}: {whole(made.vocab_size)} tokens{fewer}, end of document {made.eod_id}")
    if isinstance(documents, ReadableDocuments):
        print_broken([with_options(fault) for fault in documents.broken])
