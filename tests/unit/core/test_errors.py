import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.core.errors import UserError, first_line, shown
from megastable.core.user_paths import expanded


@given(st.text())
def test_what_is_shown_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    result = shown(text)
    assert result.isprintable()
    assert not any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") for character in result)
    assert (result == text) == text.isprintable()
    result.encode()  # every encoding error of a half of a surrogate pair has gone as well


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("one\ntwo", r"one\ntwo"),
        ("\ud800", r"\ud800"),
        ("größer, 層, [red]", "größer, 層, [red]"),
    ],
)
def test_escapes_are_written_out_and_letters_stay(text: str, safe: str) -> None:
    assert shown(text) == safe


def test_a_user_error_keeps_its_lines_and_shows_the_rest() -> None:
    assert str(UserError("first \x1b[31m\n  second")) == "first \\x1b[31m\n  second"


def test_a_home_that_does_not_exist_is_one_message() -> None:
    with pytest.raises(UserError, match=r"~no-such-user-here/x: .*home directory.*; write the folder's whole path"):
        expanded("~no-such-user-here/x")


def test_a_line_that_ends_with_a_colon_is_shown_with_what_follows() -> None:
    assert first_line(ValueError("no tokenizer in one of: \n(1) a file, \n(2) a folder")) == (
        "ValueError: no tokenizer in one of: (1) a file, (2) a folder"
    )
    assert first_line(ValueError("first\nsecond")) == "ValueError: first"
    assert first_line(ValueError()) == "ValueError"
    assert len(first_line(ValueError("one of:\n" + "word " * 1000))) < 450
