"""``megastable data inspect`` and ``merge``: what is in a pair, and several pairs as Megatron joins them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.errors import UserError
from megastable.data.beside import meta_path, record_beside, tokenizer_path
from megastable.data.indexed_format import index_path, open_indexed, tokens_path, write_index
from megastable.data.indexed_writer import checksums_path
from megastable.data.inspection import inspect_pair
from megastable.data.merging import merge_pairs
from tests.data.test_build import build, command, rows_file
from tests.data.test_indexed_format import Documents, write

EOD = 256


def inspected(*arguments: Any) -> tuple[int, dict[str, Any]]:
    code, output, errors = command("inspect", *arguments, "--json")
    assert code in (0, 1), errors
    document: dict[str, Any] = json.loads(output)
    return code, document


@settings(max_examples=40, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=12))
def test_counts_lengths_and_duplicates(tmp_path_factory: pytest.TempPathFactory, documents: Documents) -> None:
    prefix = tmp_path_factory.mktemp("pairs") / "pair"
    write(prefix, documents, 257)
    found = inspect_pair(prefix, show_progress=False)
    seen: set[tuple[int, ...]] = set()
    duplicates = []
    for document in documents:
        if document and tuple(document) in seen:
            duplicates.append(document)
        seen.add(tuple(document))
    lengths = sorted(map(len, documents))
    assert (found.documents, found.empty_documents) == (len(documents), lengths.count(0))
    assert found.duplicate_documents == len(duplicates)
    assert found.duplicate_tokens == sum(map(len, duplicates))
    assert found.tokens == sum(lengths)
    if documents:
        assert (found.shortest, found.longest) == (lengths[0], lengths[-1])
        assert found.mean == pytest.approx(np.mean(lengths))
    assert (found.vocab_size, found.ids_outside, found.not_ended) == (None, None, None)


def test_a_pair_that_was_built_here_is_held_against_its_record(tmp_path: Path) -> None:
    build(rows_file(tmp_path / "rows.jsonl.gz"), "-o", tmp_path / "pair", "-t", "bytes", "--validation-fraction", 0.2)
    for name in ("pair", "pair.validation"):
        code, found = inspected(tmp_path / name)
        assert code == 0
        assert (found["vocab_size"], found["ids_outside"], found["not_ended"], found["faults"]) == (257, 0, 0, [])
    ids = np.memmap(tokens_path(tmp_path / "pair"), "<u2", mode="r+")
    ids[-1] = 300
    ids.flush()
    code, found = inspected(tmp_path / "pair")
    assert code == 1
    assert (found["ids_outside"], found["not_ended"], found["largest_id"]) == (1, 1, 300)
    assert "1 tokens have ids outside the vocabulary of 257" in found["faults"][0]


def test_a_document_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    texts = ["first", "\x1b[31mred\nline\u202e", "long " * 100]
    build(rows_file(tmp_path / "rows.jsonl.gz", texts), "-o", tmp_path / "pair", "-t", "bytes")
    code, output, _ = command("inspect", tmp_path / "pair", "--document", 1)
    assert code == 0
    assert output.splitlines()[-1] == r"document 1: \x1b[31mred\nline\u202e<|endoftext|>"
    assert command("inspect", tmp_path / "pair", "--document", 2)[1].rstrip().endswith("long long  ...")
    code, _, message = command("inspect", tmp_path / "pair", "--document", 3)
    assert code == 2 and "--document 3: " in message and "has documents 0 to 2" in message


def test_a_pair_of_another_tool_wants_a_tokenizer_to_be_shown(tmp_path: Path) -> None:
    write(tmp_path / "pair", [[*b"some text", EOD]], 257)
    code, _, message = command("inspect", tmp_path / "pair", "--document", 0)
    assert code == 2 and "name its folder with --tokenizer" in message
    build(rows_file(tmp_path / "rows.jsonl.gz"), "-o", tmp_path / "other", "-t", "bytes")
    output = command("inspect", tmp_path / "pair", "--document", 0, "-t", tmp_path / "other.tokenizer")[1]
    assert "document 0: some text<|endoftext|>" in output


def test_a_pair_that_is_damaged_is_one_message(tmp_path: Path) -> None:
    write(tmp_path / "pair", [[1, 2]], 257)
    tokens_path(tmp_path / "pair").write_bytes(b"\0")
    code, _, message = command("inspect", tmp_path / "pair")
    assert code == 2 and message.startswith(str(tmp_path / "pair.bin"))


def megatron() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def write_sentences(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], vocab_size: int) -> None:
    """Write documents of several sequences, as Megatron does with sentences."""
    builder = megatron().IndexedDatasetBuilder(f"{prefix}.bin", dtype=megatron().DType.optimal_dtype(vocab_size))
    for document in documents:
        for sentence in document:
            builder.add_item(_tensor(sentence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def _tensor(ids: Sequence[int]) -> Any:
    import torch

    return torch.tensor(list(ids), dtype=torch.int64)


@settings(max_examples=8, deadline=None)
@given(
    pairs=st.lists(
        st.lists(st.lists(st.lists(st.integers(0, 256), max_size=4), max_size=3), max_size=4), min_size=1, max_size=3
    ),
    vocab_size=st.sampled_from([257, 70_000]),
)
def test_a_merge_is_byte_for_byte_megatrons(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[list[list[list[int]]]], vocab_size: int
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    prefixes = [folder / str(index) for index in range(len(pairs))]
    dtype = megatron().DType.optimal_dtype(vocab_size)
    builder = megatron().IndexedDatasetBuilder(f"{folder}/theirs.bin", dtype=dtype)
    for prefix, documents in zip(prefixes, pairs, strict=True):
        write_sentences(prefix, documents, vocab_size)
        # Its reader maps no empty file.
        if open_indexed(prefix).sequence_lengths.size or documents:
            builder.add_index(str(prefix))
    builder.finalize(f"{folder}/theirs.idx")
    with mock.patch("os.fsync"):  # which takes seconds on a busy disk
        merge_pairs(prefixes, folder / "ours", show_progress=False)
    for suffix in ("bin", "idx"):
        assert (folder / f"ours.{suffix}").read_bytes() == (folder / f"theirs.{suffix}").read_bytes()


def test_merged_pairs_keep_their_tokenizer(tmp_path: Path) -> None:
    build(rows_file(tmp_path / "rows.jsonl.gz"), "-o", tmp_path / "a", "-t", "bytes", "--validation-fraction", 0.2)
    code, output, errors = command("merge", tmp_path / "a", tmp_path / "a.validation", "-o", tmp_path / "out/b")
    assert code == 0, errors
    assert f"wrote {tmp_path}/out/b: 60 documents" in output
    assert (tmp_path / "out/b.tokenizer/tokenizer.json").is_file()
    suffixes = sorted(path.suffix for path in (tmp_path / "out").iterdir())
    assert suffixes == [".bin", ".crc32", ".idx", ".json", ".tokenizer"]
    record, merged = record_beside(tmp_path / "out/b"), open_indexed(tmp_path / "out/b")
    assert record is not None
    assert (record.num_documents, record.num_train_tokens, record.vocab_size, record.eod_id) == (
        60, len(merged.tokens), 257, EOD,
    )  # fmt: skip
    code, found = inspected(tmp_path / "out/b")
    assert (code, found["not_ended"], found["damage"]) == (0, 0, None)
    code, _, message = command("merge", tmp_path / "a", tmp_path / "a", "-o", tmp_path / "out/b")
    assert code == 2 and "nothing is overwritten" in message


def test_pairs_that_mean_different_text_are_not_merged(tmp_path: Path) -> None:
    build(rows_file(tmp_path / "rows.jsonl.gz"), "-o", tmp_path / "a", "-t", "bytes")
    write(tmp_path / "b", [[1]], 70_000)
    with pytest.raises(UserError, match=r"b\.bin has ids of int32, .*a\.bin of uint16"):
        merge_pairs([tmp_path / "a", tmp_path / "b"], tmp_path / "c", show_progress=False)
    write(tmp_path / "d", [[1]], 257)
    with pytest.raises(UserError, match="was made with another tokenizer"):
        merge_pairs([tmp_path / "a", tmp_path / "d"], tmp_path / "c", show_progress=False)
    write_index(index_path(tmp_path / "e"), "<u2", np.array([5]))
    with pytest.raises(UserError, match=r"e\.bin cannot be read"):
        merge_pairs([tmp_path / "a", tmp_path / "e"], tmp_path / "c", show_progress=False)
    assert not list(tmp_path.glob("c*"))


@pytest.mark.parametrize("has_record", [True, False])
def test_damaged_tokens_are_found_and_not_given_new_checksums(tmp_path: Path, has_record: bool) -> None:
    texts = [f"{number} {'many words ' * 90}" for number in range(100)]
    build(rows_file(tmp_path / "rows.jsonl.gz", texts), "-o", tmp_path / "a", "-t", "bytes")
    if not has_record:
        meta_path(tmp_path / "a").unlink()
    ids = np.memmap(tokens_path(tmp_path / "a"), "<u2", mode="r+")
    ids[40_000] = 7 + (ids[40_000] == 7)
    ids.flush()
    code, found = inspected(tmp_path / "a")
    assert code == 1
    assert found["faults"] == [
        "the tokens are damaged: other tokens than were written, somewhere in 32,768 to 65,535"
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"a\.bin has other tokens than were written, somewhere in 32,768 to 65,535"):
        merge_pairs([tmp_path / "a", tmp_path / "a"], tmp_path / "c", show_progress=False)
    checksums_path(tmp_path / "a").write_bytes(b"abcd")
    with pytest.raises(UserError, match=r"the checksums beside .*a\.bin are not its own"):
        merge_pairs([tmp_path / "a"], tmp_path / "c", show_progress=False)
    assert not [path for path in tmp_path.glob("c*") if path.suffix != ".lock"]


def test_a_merge_that_ends_early_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(rows_file(tmp_path / "rows.jsonl.gz"), "-o", tmp_path / "a", "-t", "bytes")
    monkeypatch.setattr("os.rename", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        merge_pairs([tmp_path / "a"], tmp_path / "c", show_progress=False)
    assert not [path for path in tmp_path.glob("c*") if path.suffix != ".lock"]


def test_an_output_is_merged_by_one_process(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1]], 257)
    with (
        FileLock(tmp_path / "c.merging.lock"),
        pytest.raises(UserError, match=r"another process is merging into .*/c;"),
    ):
        merge_pairs([tmp_path / "a"], tmp_path / "c", show_progress=False)


@pytest.mark.parametrize("alike", [True, False])
def test_tokenizers_in_another_form_are_compared_by_their_files(tmp_path: Path, alike: bool) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, [[1]], 257)
        tokenizer_path(tmp_path / name).mkdir()
        (tokenizer_path(tmp_path / name) / "tokenizer.model").write_text("same" if alike else name)
    prefixes = [tmp_path / "a", tmp_path / "b"]
    if alike:
        assert merge_pairs(prefixes, tmp_path / "c", show_progress=False).num_documents == 2
        return
    with pytest.raises(UserError, match="was made with another tokenizer"):
        merge_pairs(prefixes, tmp_path / "c", show_progress=False)


def test_a_trained_tokenizer_encodes_as_it_was_trained(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from megastable.cli.main import app

    rows = rows_file(tmp_path / "rows.jsonl.gz", line_7="{")
    words = ["tokenizer", "train", str(rows), "-o", str(tmp_path / "made"), "--vocab-size", "280"]
    with pytest.raises(UserError, match="line 7 is not JSON"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    result = CliRunner().invoke(app, [*words, "--broken", "skip"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "280 tokens, end of document 0" in result.stdout and "left out 1 document that cannot" in result.stdout
    with pytest.raises(UserError, match="made exists, and nothing is overwritten"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    build(rows, "-o", tmp_path / "pair", "-t", tmp_path / "made", "--broken", "skip")
    output = command("inspect", tmp_path / "pair", "--document", 2)[1]
    assert output.splitlines()[-1] == "document 2: document 2: äbäb<|endoftext|>"


@pytest.mark.parametrize("folder", [".", "..", "out/", "out/..", "/"])
def test_a_folder_is_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    (tmp_path / "in/out").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "in")
    rows = rows_file(tmp_path / "rows.jsonl.gz")
    write(tmp_path / "a", [[1]], 257)
    lines: dict[str, list[list[Any]]] = {
        "--output": [["build", rows, "-t", "bytes", "-o", folder], ["merge", tmp_path / "a", "-o", folder]],
        "PAIR": [["inspect", folder], ["merge", folder, "-o", "c"]],
    }
    for option, words_of in lines.items():
        for words in words_of:
            code, _, message = command(*words)
            assert code == 2 and message.startswith(f"{option}: {folder!r} is a folder; legal is a pair in it: ")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "a.bin",
        "a.crc32",
        "a.idx",
        "in",
        "out",
        "rows.jsonl.gz",
    ]


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_pair_may_be_named_by_one_of_its_files(tmp_path: Path, suffix: str) -> None:
    rows = rows_file(tmp_path / "rows.jsonl.gz")
    build(rows, "-t", "bytes", "-o", tmp_path / f"v1.5{suffix}")
    assert (tmp_path / "v1.5.bin").is_file()
    assert inspected(tmp_path / f"v1.5{suffix}")[1]["documents"] == 60
    assert command("merge", tmp_path / f"v1.5{suffix}", "-o", tmp_path / f"b{suffix}")[0] == 0
    assert (tmp_path / "b.bin").is_file()
