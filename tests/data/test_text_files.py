"""Which files of a folder are documents: links, circles, what is no text, and bytes as they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config.data import TextSourceConfig
from megastable.core.errors import UserError
from megastable.data import prepare_corpus
from megastable.data.text_files import TextFiles, open_text
from tests.data.data_examples import prepare_single, text_data, tiny_model, write_documents


def opened(path: Path) -> TextFiles:
    return open_text(TextSourceConfig(type="text", path=str(path)))


def texts_of(source: TextFiles) -> list[str]:
    return [source[index] for index in range(len(source))]


@settings(max_examples=60, deadline=None)
@given(content=st.text(st.sampled_from("a\r\n\ufeff\x00\x85\u2028é"), min_size=1))
def test_text_is_read_as_it_is_and_its_bytes_are_the_tokens(
    tmp_path_factory: pytest.TempPathFactory, content: str
) -> None:
    folder = tmp_path_factory.mktemp("raw")
    (folder / "a.txt").write_bytes(content.encode())
    assert texts_of(opened(folder)) == [content]
    data = text_data(write_documents(folder / "long", {"a.txt": content * 9}), folder / "cache", validation_fraction=0)
    tokens = prepare_single(data, tiny_model()).train.tokens
    assert bytes(tokens[:-1].tolist()) == (content * 9).encode()


def test_links_to_folders_are_followed_once_and_circles_end(tmp_path: Path) -> None:
    root = write_documents(tmp_path / "root", {"z/a.txt": "a", "b.txt": "b"})
    outside = write_documents(tmp_path / "outside", {"c.txt": "c", "deep/d.txt": "d"})
    for link, target in {
        "outside": outside,
        "again": outside,
        "into_itself": root,
        "y_is_z": root / "z",
        "z/up": root,
    }.items():
        (root / link).symlink_to(target)
    (outside / "back").symlink_to(root)
    assert sorted(texts_of(opened(root))) == ["a", "b", "c", "d"]
    # A folder below the root keeps its own name, which the order and the key of the cache go by.
    assert texts_of(opened(root))[-1] == "a"
    assert opened(root).remarks() == ()
    assert sorted(texts_of(opened(root / "**/*.txt"))) == sorted({"a", "b", "c", "d"})


def test_links_that_lead_nowhere_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_documents(tmp_path / "root", {"a.txt": "a text of some length"})
    for index in range(3):
        (root / f"gone{index}.txt").symlink_to(tmp_path / "missing")
    (root / "self.txt").symlink_to(root / "self.txt")
    os.mkfifo(root / "pipe.txt")
    (remark,) = opened(root).remarks()
    assert remark.startswith("left out 5 links and special files that lead to no file, such as ")
    (remark,) = opened(root / "*.txt").remarks()
    assert remark.startswith("left out 4 links")
    prepare_corpus(text_data(root, tmp_path / "cache"), tiny_model(), show_progress=True)
    assert f"{root}: left out 5 links" in capsys.readouterr().err


BINARIES = {
    "module.pyc": b"\xa7\r\r\n\x00\x00",
    "image.png": b"\x89PNG\r\n\x1a\n",
    "latin.txt": "é".encode("latin-1"),
    "utf16.txt": "text".encode("utf-16"),
}


def test_a_folder_skips_what_is_no_text_and_counts_it(tmp_path: Path) -> None:
    root = write_documents(tmp_path, {"a.txt": "a", "b.txt": "é" * 8193})  # whose 8192th byte is half a character
    for name, content in BINARIES.items():
        (root / name).write_bytes(content)
    write_documents(root / "__pycache__", {"text.txt": "no"})
    assert texts_of(opened(root)) == ["a", "é" * 8193]
    (remark,) = opened(root).remarks()
    assert remark == f"left out 4 files that are no UTF-8 text, such as {root}/image.png"


@pytest.mark.parametrize("name", BINARIES)
def test_a_file_that_is_named_and_no_text_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(BINARIES[name])
    for path in (name, "*.*"):
        with pytest.raises(UserError, match=rf"{name} is not UTF-8 text \(byte \d"):
            texts_of(opened(tmp_path / path))
    with pytest.raises(UserError, match=r"has no text: .*; left out 1 files that are no UTF-8 text"):
        opened(tmp_path)


@pytest.mark.parametrize("function", ["stat", "open"])
def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    write_documents(tmp_path, {"a.txt": "a"})
    unchanged = getattr(Path, function)

    def denied(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "a.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return unchanged(path, *arguments, **options)

    source = opened(tmp_path)
    monkeypatch.setattr(Path, function, denied)
    with pytest.raises(UserError, match=r"source\.path: .*a\.txt cannot be read \(Permission denied\)"):
        source.fingerprint() if function == "stat" else source[0]


def test_a_folder_that_cannot_be_read_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_documents(tmp_path, {"a.txt": "a", "secret/b.txt": "b"})
    scan = os.scandir

    def denied(path: Any) -> Any:
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(UserError, match="secret cannot be read"):
        opened(tmp_path)
