"""Generated text: the tokens that transformers would take, whole characters, and draws that keep to their bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from megastable.data.text_tokenizers import BytesTokenizer
from megastable.interop.generation import Sampling, WholeCharacters, generate
from megastable.interop.saved_model import SavedModel, open_saved_model
from megastable.interop.tokenizer import find_tokenizer, open_tokenizer
from tests.interop.moved_models import exported, imported, save_theirs

GREEDY = Sampling(temperature=0, top_k=0, top_p=1.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """A model of bytes whose tokens are all drawn, control characters and halves of characters too."""
    folder = tmp_path_factory.mktemp("model")
    save_theirs(folder / "theirs", "llama")
    imported(folder, folder / "theirs")
    exported(folder / "run", folder / "out")
    return open_saved_model(folder / "run", lambda text: None)


def continued(saved: SavedModel, prompt: str, max_tokens: int, sampling: Sampling = GREEDY, seed: int = 0) -> str:
    """Return a continuation as one text."""
    tokenizer = open_tokenizer(find_tokenizer(saved, None))
    return "".join(generate(saved, tokenizer, prompt, max_tokens, sampling, seed))


def test_the_likeliest_tokens_are_those_of_transformers(saved: SavedModel) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(saved.checkpoint.parents[2] / "out")
    ids = torch.tensor([list(b"abcd")])
    # More tokens than a byte has ids could be drawn by a model of 300; ours leaves them out.
    expected = theirs.generate(
        ids, max_new_tokens=10, do_sample=False, pad_token_id=256, suppress_tokens=list(range(257, 300))
    )[0, 4:].tolist()
    tokenizer = open_tokenizer(find_tokenizer(saved, None))
    ours = continued(saved, "abcd", 10)
    assert ours == tokenizer.decode([token for token in expected if token != 256])


def test_a_text_may_grow_past_the_length_of_a_sample(saved: SavedModel) -> None:
    assert saved.model.seq_length == 16
    long = continued(saved, "a prompt that is longer than one sample", 20)
    assert len(long) > 10


def test_a_seed_draws_one_text_and_another_seed_another(saved: SavedModel) -> None:
    bold = Sampling(temperature=1.5, top_k=0, top_p=1.0)
    assert continued(saved, "x", 12, bold, seed=3) == continued(saved, "x", 12, bold, seed=3)
    assert continued(saved, "x", 12, bold, seed=3) != continued(saved, "x", 12, bold, seed=4)


def test_an_empty_prompt_begins_a_document(saved: SavedModel) -> None:
    assert continued(saved, "", 5)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The tokenizer of bytes, as transformers opens it."""
    folder = tmp_path_factory.mktemp("bytes")
    BytesTokenizer().save(folder)
    return open_tokenizer({path.name: path.read_bytes() for path in folder.iterdir()})


@given(text=st.text(max_size=30))
@settings(deadline=None, max_examples=200)
def test_no_piece_has_a_part_of_a_character(byte_tokenizer: object, text: str) -> None:
    whole = WholeCharacters(byte_tokenizer)
    pieces = [whole.add(byte) for byte in text.encode()]
    assert "".join([*pieces, whole.rest()]) == text
    assert all(piece == "" or piece in text for piece in pieces)
    # What is whole is shown at once.
    assert sum(map(bool, pieces)) == len(text) or "\ufffd" in text


@given(content=st.binary(max_size=20))
@settings(deadline=None, max_examples=200)
def test_bytes_that_are_no_text_are_shown_as_marks(byte_tokenizer: object, content: bytes) -> None:
    whole = WholeCharacters(byte_tokenizer)
    shown = "".join([*(whole.add(byte) for byte in content), whole.rest()])
    assert shown == content.decode("utf-8", "replace")


def spaced_tokenizer(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    """A tokenizer in the way of SentencePiece: a word has its space before it, and bytes are a last resort."""
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "\u2581cat", "s"]
    model = models.Unigram([(token, -1.0) for token in vocabulary], unk_id=0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


SPACED = {
    "metaspace": spaced_tokenizer(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "llama": spaced_tokenizer(
        decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    ),
}
spaced_text = st.lists(st.sampled_from(["the", "cat", "cats", "s", "é", "語", "", "\n"]), max_size=12).map(" ".join)


@pytest.mark.parametrize("kind", SPACED)
@given(prompt=spaced_text, text=spaced_text)
@settings(deadline=None, max_examples=100)
def test_spaces_before_words_are_those_of_the_whole_text(kind: str, prompt: str, text: str) -> None:
    tokenizer = SPACED[kind]
    before, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    whole = WholeCharacters(tokenizer, before)
    shown = "".join([*map(whole.add, ids), whole.rest()])
    assert f"{tokenizer.decode(before)}{shown}" == tokenizer.decode([*before, *ids])


def test_a_continuation_begins_with_the_space_of_its_first_word() -> None:
    tokenizer = SPACED["llama"]
    whole = WholeCharacters(tokenizer, tokenizer.encode("the"))
    assert [whole.add(token) for token in tokenizer.encode("cats the")] == [" cat", "s", " the"]


@pytest.mark.parametrize(("prompt", "expected"), [("the", " cats the"), ("", "cats the")])
def test_generated_text_goes_on_where_the_prompt_ends(
    saved: SavedModel, monkeypatch: pytest.MonkeyPatch, prompt: str, expected: str
) -> None:
    tokenizer = SPACED["metaspace"]
    tokenizer.eos_token = "<unk>"
    drawn = iter([*tokenizer.encode("cats the"), tokenizer.eos_token_id])
    monkeypatch.setattr(Sampling, "draw", lambda *arguments: next(drawn))
    assert "".join(generate(saved, tokenizer, prompt, 10, GREEDY, 0)) == expected


class CountingTokenizer:
    """Decodes bytes, and counts them."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        """Decode as the tokenizer of bytes does."""
        self.num_decoded += len(ids)
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("content", [b"a", "語".encode(), b"\xff"])
def test_the_work_for_a_token_does_not_grow_with_the_text(content: bytes) -> None:
    decoded = []
    for repeats in (1_000, 2_000):
        tokenizer = CountingTokenizer()
        whole = WholeCharacters(tokenizer)
        shown = "".join([*map(whole.add, content * repeats), whole.rest()])
        assert shown == (content * repeats).decode("utf-8", "replace")
        decoded.append(tokenizer.num_decoded)
    assert decoded[1] < 2.2 * decoded[0]


logits = st.lists(st.integers(-30, 30), min_size=1, max_size=12).map(lambda values: torch.tensor(values) / 4)
"""Differences of logits that no softmax rounds away."""


@given(logits=logits, top_k=st.integers(0, 15), top_p=st.floats(1e-6, 1), seed=st.integers(0, 99))
@settings(deadline=None)
def test_a_draw_is_among_the_likeliest(logits: torch.Tensor, top_k: int, top_p: float, seed: int) -> None:
    sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p)
    token = sampling.draw(logits, torch.Generator().manual_seed(seed))
    likelier = logits > logits[token]
    if top_k:
        assert int(likelier.sum()) < top_k
    probability = (logits.double() / 0.7).softmax(-1)[likelier].sum()
    assert float(probability) < top_p + 1e-9


@given(logits=logits, seed=st.integers(0, 99))
@settings(deadline=None)
def test_one_candidate_is_the_likeliest(logits: torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for sampling in (GREEDY, Sampling(1.0, 1, 1.0), Sampling(1.0, 0, 1e-6), Sampling(1e-30, 0, 1.0)):
        assert logits[sampling.draw(logits, generator)] == logits.max()


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    generator = torch.Generator().manual_seed(1)
    drawn = [Sampling(0.5, 0, 1.0).draw(logits, generator) for _ in range(4000)]
    shares = torch.bincount(torch.tensor(drawn), minlength=3) / len(drawn)
    torch.testing.assert_close(shares, (logits / 0.5).softmax(-1), atol=0.02, rtol=0)
