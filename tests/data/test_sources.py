from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any, cast

import pytest
from datasets import Dataset, DatasetDict
from pydantic import TypeAdapter

from megastable.config import SourceConfig
from megastable.config.data import SourceSection
from megastable.config.section import kinds_of, tag_of
from megastable.core.errors import UserError
from megastable.data.prompts import text_of
from megastable.data.sources import SOURCES, DocumentSource, open_source
from tests.data.data_examples import DOCUMENTS, write_documents


def opened(**settings: Any) -> DocumentSource:
    return cast(DocumentSource, open_source(TypeAdapter(SourceConfig).validate_python(settings)))


def texts_of(source: DocumentSource) -> list[str]:
    return [text_of(source[index]) for index in range(len(source))]


def test_the_standard_library_without_other_packages_and_tests() -> None:
    source = opened(type="stdlib")
    texts = set(texts_of(source))
    root = Path(sysconfig.get_path("stdlib"))
    assert {(root / name).read_text() for name in ("argparse.py", "json/decoder.py")} <= texts
    assert Path(pytest.__file__).read_text() not in texts
    assert not any("class BaseTestCase" in text for text in texts)
    assert len(texts) > 300


def test_a_folder_is_read_in_the_order_of_its_names_without_hidden_and_empty_files(tmp_path: Path) -> None:
    write_documents(tmp_path / ".hidden", {"a.txt": "no"})
    write_documents(tmp_path, DOCUMENTS | {".git/config": "no", "part0/.draft": "no", "empty.txt": ""})
    assert texts_of(opened(type="text", path=str(tmp_path))) == [DOCUMENTS[name] for name in sorted(DOCUMENTS)]


def test_a_file_and_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_documents(tmp_path, {"b.txt": "b", "a.txt": "a", "c.md": "c", "deep/d.txt": "d", "odd[1].txt": "odd"})
    assert texts_of(opened(type="text", path=str(tmp_path / "b.txt"))) == ["b"]
    assert texts_of(opened(type="text", path=str(tmp_path / "odd[1].txt"))) == ["odd"]
    assert texts_of(opened(type="text", path=str(tmp_path / "?.txt"))) == ["a", "b"]
    assert texts_of(opened(type="text", path=str(tmp_path / "**/*.txt"))) == ["a", "b", "d", "odd"]
    monkeypatch.chdir(tmp_path / "deep")
    assert texts_of(opened(type="text", path="../*.md")) == ["c"]


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    def fingerprint() -> str:
        return opened(type="text", path=str(tmp_path)).fingerprint()

    write_documents(tmp_path, {"a.txt": "a", "b.txt": "b"})
    seen = [fingerprint()]
    assert fingerprint() == seen[0]
    (tmp_path / "a.txt").write_text("A")  # the same size
    os.utime(tmp_path / "a.txt", ns=(0, 1))  # some file systems' clocks are too coarse for a test
    seen.append(fingerprint())
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    seen.append(fingerprint())
    write_documents(tmp_path, {"d.txt": "d"})
    seen.append(fingerprint())
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "missing does not exist; legal are a file, a folder or a glob"),
        ("*.rst", r"\*\.rst matches no file"),
        ("void", "void has no text"),
        ("blank.txt", "blank.txt has no text"),
    ],
)
def test_a_path_without_text(tmp_path: Path, path: str, message: str) -> None:
    write_documents(tmp_path, {"blank.txt": ""})
    (tmp_path / "void").mkdir()
    with pytest.raises(UserError, match=f"megastable.data.source.path: {tmp_path}/{message}"):
        opened(type="text", path=str(tmp_path / path))


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    write_documents(tmp_path, {"a.txt": "fine"})
    # Past the first bytes, by which a folder's files are told from binaries.
    (tmp_path / "b.txt").write_bytes(b"o" * 9000 + b"\xff\xfe")
    source = opened(type="text", path=str(tmp_path))
    assert source[0] == "fine"
    with pytest.raises(UserError, match=r"b\.txt is not UTF-8 text \(byte 9,000\)"):
        source[1]


ROWS = {"text": ["one", "two", "three"], "id": [1, 2, 3]}


def test_a_saved_dataset(tmp_path: Path) -> None:
    Dataset.from_dict(ROWS).save_to_disk(tmp_path)
    source = opened(type="hf", path=str(tmp_path))
    assert texts_of(source) == ROWS["text"]
    assert source.fingerprint() == opened(type="hf", path=str(tmp_path)).fingerprint()
    Dataset.from_dict(ROWS | {"text": ["one", "two", "four"]}).save_to_disk(tmp_path)
    assert source.fingerprint() != opened(type="hf", path=str(tmp_path)).fingerprint()


def test_a_split_of_a_saved_dataset(tmp_path: Path) -> None:
    splits = {"train": Dataset.from_dict(ROWS), "extra": Dataset.from_dict({"text": ["other"]})}
    DatasetDict(splits).save_to_disk(tmp_path)
    assert texts_of(opened(type="hf", path=str(tmp_path))) == ROWS["text"]
    assert texts_of(opened(type="hf", path=str(tmp_path), split="extra")) == ["other"]
    with pytest.raises(UserError, match="no split 'test'; its splits are train, extra"):
        opened(type="hf", path=str(tmp_path), split="test")


def test_what_load_dataset_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = write_documents(tmp_path / "rows", {"train.jsonl": '{"body": "one"}\n{"body": "two"}\n'})
    assert texts_of(opened(type="hf", path=str(folder), text_column="body")) == ["one", "two"]
    with pytest.raises(UserError, match=r"datasets cannot open .*/rows .*'train\[:0\]'.* no data"):
        opened(type="hf", path=str(folder), text_column="body", split="train[:0]")
    with pytest.raises(UserError, match=r"datasets cannot open .*/rows \(name None, split 'test'\)"):
        opened(type="hf", path=str(folder), text_column="body", split="test")


def test_a_missing_column_is_answered_with_those_there_are(tmp_path: Path) -> None:
    Dataset.from_dict(ROWS).save_to_disk(tmp_path)
    with pytest.raises(UserError, match=r"source\.text_column: .* no column 'body'; its columns are text, id"):
        opened(type="hf", path=str(tmp_path), text_column="body")


def test_a_row_that_is_not_text_is_named(tmp_path: Path) -> None:
    Dataset.from_dict({"text": [["one"], ["two"]]}).save_to_disk(tmp_path)
    source = opened(type="hf", path=str(tmp_path))
    with pytest.raises(UserError, match=r"row 1 of .* holds list, not text"):
        source[1]


def test_datasets_that_are_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"datasets cannot open .*/missing"):
        opened(type="hf", path=str(tmp_path / "missing"))
    Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "empty")
    with pytest.raises(UserError, match=r"datasets cannot open .*/empty"):
        opened(type="hf", path=str(tmp_path / "empty"))


def test_run_files_and_the_registry_know_the_same_sources() -> None:
    assert {tag_of(kind) for kind in kinds_of(SourceSection)} == SOURCES.keys()


def test_a_stream_is_the_first_rows_in_whatever_order_they_are_read(tmp_path: Path) -> None:
    folder = write_documents(
        tmp_path / "rows", {"train.jsonl": "".join(f'{{"body": "{number}"}}\n' for number in range(9))}
    )
    source = opened(type="hf", path=str(folder), text_column="body", stream_rows=7)
    assert texts_of(source) == [str(number) for number in range(7)]
    assert [source[index] for index in (3, 4, 6, 1, 1, 0)] == ["3", "4", "6", "1", "1", "0"]
    assert source.fingerprint() == opened(type="hf", path=str(folder), text_column="body", stream_rows=7).fingerprint()
    assert source.fingerprint() != opened(type="hf", path=str(folder), text_column="body", stream_rows=6).fingerprint()
    with pytest.raises(UserError, match=r"no column 'text'; its columns are body"):
        opened(type="hf", path=str(folder), stream_rows=7)
    with pytest.raises(UserError, match=r"stream_rows: 10, but .* ends before it has row 9"):
        opened(type="hf", path=str(folder), text_column="body", stream_rows=10)[9]
    with pytest.raises(UserError, match=r"cannot open .*/rows as a stream .*'test'"):
        opened(type="hf", path=str(folder), text_column="body", split="test", stream_rows=1)


def test_a_saved_dataset_is_streamed_too(tmp_path: Path) -> None:
    Dataset.from_dict(ROWS).save_to_disk(tmp_path)
    assert texts_of(opened(type="hf", path=str(tmp_path), stream_rows=2)) == ["one", "two"]


def test_synthetic_text_is_a_function_of_its_seed(tmp_path: Path) -> None:
    source = opened(type="synthetic", num_documents=300, words_per_document=40)
    texts = texts_of(source)
    assert texts == texts_of(opened(type="synthetic", num_documents=300, words_per_document=40))
    assert len(set(texts)) == 300
    lengths = [len(text.split()) for text in texts]
    assert 20 <= min(lengths) < 25 < 55 < max(lengths) <= 60
    num_bytes = source.num_bytes()
    assert num_bytes is not None
    assert sum(map(len, texts)) == pytest.approx(num_bytes, rel=0.05)
    other = opened(type="synthetic", num_documents=300, words_per_document=40, seed=1)
    assert not set(texts) & set(texts_of(other))
    assert source.fingerprint() != other.fingerprint()
    # The same on every machine and in every version.
    assert texts[0].split()[:6] == ["be", "ca", "biba", "tuci", "ba", "mebu"]
