"""Files of JSON lines: read in order and out of it, compressed or not, and every fault named with its file and line."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config import JsonlSourceConfig
from megastable.core.errors import UserError
from megastable.data import prepare_corpus
from megastable.data.json_lines import JsonLines
from tests.data.data_examples import text_data, tiny_model


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, "zstd", asbytes=True))


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def lines_of(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def opened(path: Path, **settings: Any) -> JsonLines:
    return JsonLines(JsonlSourceConfig(type="jsonl", path=str(path), **settings))


@settings(max_examples=40, deadline=None)
@given(
    files=st.lists(
        st.tuples(st.sampled_from(list(COMPRESSIONS)), st.lists(st.text(max_size=5), min_size=1, max_size=4)),
        min_size=1,
        max_size=3,
    ),
    order=st.randoms(use_true_random=False),
)
def test_documents_are_the_lines_of_all_files_in_whatever_order_they_are_read(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[str, list[str]]], order: Any
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    for index, (suffix, texts) in enumerate(files):
        (folder / f"{index}.jsonl{suffix}").write_bytes(COMPRESSIONS[suffix](lines_of(texts)))
    source = opened(folder)
    texts = [text for _, texts in files for text in texts]
    assert len(source) == len(texts)
    assert [source[index] for index in range(len(texts))] == texts
    mixed = [*range(len(texts))] * 2
    order.shuffle(mixed)
    assert [source[index] for index in mixed] == [texts[index] for index in mixed]


def test_compressed_files_may_have_several_parts(tmp_path: Path) -> None:
    for suffix, compress in COMPRESSIONS.items():
        path = tmp_path / f"rows.jsonl{suffix}"
        path.write_bytes(compress(lines_of(["a", "b"])) + compress(lines_of(["c"])))
        source = opened(path)
        assert [source[index] for index in range(len(source))] == ["a", "b", "c"], suffix


def test_a_last_line_without_an_end_and_empty_lines_count(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n  \r\n{"text": "b"}')
    source = opened(tmp_path / "a.jsonl")
    assert [source[index] for index in range(len(source))] == ["a", "", "", "b"]
    assert source.place(3) == f"{tmp_path}/a.jsonl, line 4"


def test_of_a_folder_only_its_own_files_are_taken_and_the_others_said(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.jsonl.gz").write_bytes(gzip.compress(lines_of(["a"])))
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "empty.jsonl").touch()
    source = opened(tmp_path)
    assert [source[index] for index in range(len(source))] == ["a"]
    remark, empty = source.remarks()
    assert "left out 1 files whose names do not end in .jsonl, .jsonl.gz, .jsonl.zst" in remark
    assert empty.startswith("left out 1 empty files, such as ")
    assert len(opened(tmp_path / "b.txt")) == 1, "a file that is named is taken as it is"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "is not JSON (column 2:"),
        (b'{"text": "a"} x', "is not JSON (column 15: Extra data)"),
        (b"[" * 100_000, "is not JSON"),
        (b'"text"', "is no JSON object but str"),
        (b"[]", "is no JSON object but list"),
        (b'{"body": "a", "id": 1}', "has no key 'text'; its keys are 'body', 'id'"),
        (b"{}", "has no key 'text'; its keys are none"),
        (b'{"text": null}', "holds NoneType, not text, in 'text'"),
        (b'{"text": ["a"]}', "holds list, not text, in 'text'"),
        (b'{"text": "\xff"}', "is not UTF-8 (byte 10 of the line)"),
    ],
)
def test_a_broken_line_is_named_with_its_file_and_number(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines_of(["a"]) + line + b"\n" + lines_of(["c"]))
    source = opened(path)
    assert source[0] == "a"
    with pytest.raises(UserError, match=re.escape(f"{path}, line 2 {message}")):
        source[1]
    assert source[2] == "c"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_or_none_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    content = COMPRESSIONS[suffix](lines_of([str(index) * 40 for index in range(1000)]))
    for damaged in (content[: len(content) // 2], b"no archive at all"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"megastable.data.source.path: {path} cannot be read"):
            len(opened(path))


def test_the_fingerprint_follows_the_files_and_the_key(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines_of(["a"]))
    before = opened(path).fingerprint()
    assert opened(path).fingerprint() == before != opened(path, text_key="id").fingerprint()
    path.write_bytes(lines_of(["ab"]))
    assert opened(path).fingerprint() != before


def test_opening_reads_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines_of(["a"]))
    monkeypatch.setattr("megastable.data.json_lines._open", lambda file: pytest.fail("it was read"))
    opened(tmp_path).fingerprint()


@pytest.mark.parametrize("tokenizer", [{"type": "bytes"}, {"type": "bpe", "vocab_size": 280}])
def test_lines_have_the_tokens_of_text_files_with_the_same_split(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    texts = [f"document {index}: {'äb' * (index + 1)}" for index in range(20)]
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines_of(texts)))
    (tmp_path / "texts").mkdir()
    for index, text in enumerate(texts):
        (tmp_path / f"texts/{index:02}.txt").write_text(text)
    corpora = [
        prepare_corpus(
            text_data(tmp_path, tmp_path / "cache", source={"type": kind, "path": str(path)}, tokenizer=tokenizer),
            tiny_model(),
            show_progress=False,
        )
        for kind, path in (("jsonl", tmp_path / "rows.jsonl.gz"), ("text", tmp_path / "texts"))
    ]
    assert corpora[0].num_validation_tokens > 0
    if tokenizer["type"] == "bytes":
        assert corpora[0].fingerprint == corpora[1].fingerprint


class NeverIterated(list[Path]):
    """Files of which one is looked up, and not all of them for each document."""

    def __iter__(self) -> Any:
        raise AssertionError


def test_a_document_is_found_without_a_look_at_all_files(tmp_path: Path) -> None:
    counts = [3, 1, 4, 1, 5]
    for number, count in enumerate(counts):
        (tmp_path / f"{number}.jsonl").write_bytes(lines_of([f"{number} {line}" for line in range(count)]))
    source = opened(tmp_path)
    assert len(source) == sum(counts)
    source._files = NeverIterated(source._files)
    expected = [f"{number} {line}" for number, count in enumerate(counts) for line in range(count)]
    assert [source[index] for index in range(len(source))] == expected
    for index in (-1, len(source)):
        with pytest.raises(IndexError):
            source.place(index)


def test_a_byte_order_mark_does_not_cost_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines_of(["first", "second"]))
    source = opened(tmp_path / "a.jsonl")
    assert [source[index] for index in range(len(source))] == ["first", "second"]
