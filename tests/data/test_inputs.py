"""What a command line may name as documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from megastable.cli.data import FormatName
from megastable.core.errors import UserError
from megastable.data.inputs import FORMATS, OPTIONS, Input, format_of, open_input

TEXTS = ["one", "two\nlines", "drei ü"]


def write_jsonl(folder: Path) -> None:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def write_text(folder: Path) -> None:
    for index, text in enumerate(TEXTS):
        (folder / f"{index}.txt").write_text(text)


def dataset() -> Dataset:
    return Dataset.from_dict({"text": TEXTS, "id": [1, 2, 3]})


def write_arrow(folder: Path) -> None:
    dataset().save_to_disk(folder / "saved")
    (file,) = (folder / "saved").glob("*.arrow")
    file.rename(folder / "a.arrow")
    for left in (folder / "saved").iterdir():
        left.unlink()


WRITERS: dict[str, Callable[[Path], object]] = {
    "text": write_text,
    "jsonl": write_jsonl,
    "parquet": lambda folder: dataset().to_parquet(folder / "a.parquet"),
    "arrow": write_arrow,
    "csv": lambda folder: dataset().to_csv(folder / "a.csv"),
    "dataset": lambda folder: dataset().save_to_disk(folder),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("named", ["folder", "glob"])
def test_every_format_is_recognised_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, named: str
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "input"
    folder.mkdir()
    WRITERS[name](folder)
    path = str(folder)
    if named == "glob" and name != "dataset":
        path = f"{folder}/*{FORMATS[name].suffixes[0]}"
    assert format_of(path) == name
    documents = open_input(Input(path), None).documents
    assert [documents[index] for index in range(len(documents))] == TEXTS


def test_the_command_takes_every_format() -> None:
    assert [name.value for name in FormatName] == list(FORMATS)


def test_a_folder_of_several_formats_wants_a_choice(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    (tmp_path / "b.csv").write_text("text\na\n")
    with pytest.raises(UserError, match=r"files of several formats \(csv, jsonl\); choose one with --format"):
        open_input(Input(str(tmp_path)), None)
    assert len(open_input(Input(str(tmp_path)), "jsonl").documents) == 3


def test_names_that_are_no_paths_are_datasets(tmp_path: Path) -> None:
    assert format_of("allenai/c4") == "dataset"
    assert format_of(str(tmp_path / "none")) == "text"
    assert format_of("./none") == "text"
    assert format_of("none.jsonl.zst") == "jsonl"


@pytest.mark.parametrize("name", ["parquet", "csv", "arrow"])
def test_a_table_that_is_none_or_has_no_such_column_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    WRITERS[name](tmp_path)
    with pytest.raises(UserError, match="has no column 'body'; its columns are"):
        open_input(Input(str(tmp_path), text_key="body"), name)
    (tmp_path / f"b.{name}").write_bytes(b"\xff\xfe" * 100)
    with pytest.raises(UserError, match=f"datasets cannot read .* as {name}"):
        open_input(Input(f"{tmp_path}/b.{name}"), name)


CELLS = ["", "NA", "null", "007", "1", "1.50", "nan", "None", "true", " a "]


def test_a_cell_of_csv_is_the_text_that_stands_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, cells in {"texts": CELLS, "digits": ["1", "02", "3"]}.items():
        (tmp_path / f"{name}.csv").write_text("id,text\n" + "".join(f'1,"{cell}"\n' for cell in cells))
        documents = open_input(Input(str(tmp_path / f"{name}.csv")), None).documents
        assert [documents[index] for index in range(len(documents))] == cells


@pytest.mark.parametrize("name", ["parquet", "arrow", "dataset"])
def test_a_row_without_a_value_is_a_document_without_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(f"{__name__}.TEXTS", ["one", None, "three"])
    (tmp_path / "input").mkdir()
    WRITERS[name](tmp_path / "input")
    documents = open_input(Input(str(tmp_path / "input")), None).documents
    assert [documents[index] for index in range(len(documents))] == ["one", "", "three"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("key", OPTIONS)
def test_what_a_format_does_not_read_is_refused(tmp_path: Path, name: str, key: str) -> None:
    WRITERS[name](tmp_path)
    if key in FORMATS[name].keys:
        return
    said: dict[str, Any] = {key: "text"}
    with pytest.raises(UserError, match=f"{OPTIONS[key]}: is for .*, and {tmp_path} is read as {name}"):
        open_input(Input(str(tmp_path), **said), None)


def test_a_text_beside_a_prompt_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    with pytest.raises(UserError, match="--text-key: does not go with --prompt-key"):
        open_input(Input(str(tmp_path), text_key="text", prompt_key="a", completion_key="b"), None)
