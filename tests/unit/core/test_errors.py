import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.core.errors import UserError, shown
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
