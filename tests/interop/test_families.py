"""Every family: the same logits as its class of `transformers`, and its tensors back to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megastable.core.families.registry import FAMILIES
from megastable.model.attention import ATTENTION_BACKENDS
from tests.interop.their_models import (
    SEQ_LENGTH,
    VARIANT_NAMES,
    VARIANTS,
    VOCAB_SIZE,
    back_to_theirs,
    in_a_file,
    our_model,
    our_run,
    our_tensors,
    their_model,
)

every_variant = pytest.mark.parametrize(("family", "keys"), VARIANTS, ids=VARIANT_NAMES)
TOLERANCE = 1e-5
"""Of the largest logit: they are about 10 here, so that fp32 itself leaves 1e-6 of it."""


def test_every_family_has_a_variant() -> None:
    assert {family for family, _ in VARIANTS} == set(FAMILIES)


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
@every_variant
def test_the_logits_are_those_of_their_class(family: str, keys: dict[str, Any], backend: str) -> None:
    theirs = their_model(family, **keys)
    run = our_run(theirs, attention=backend)
    ours = our_model(run, our_tensors(theirs, run))
    token_ids = torch.randint(VOCAB_SIZE, (2, SEQ_LENGTH), generator=torch.Generator().manual_seed(32))
    with torch.no_grad():
        found, expected = ours(token_ids)[..., :VOCAB_SIZE], theirs(token_ids).logits
    assert expected.std() > 0.5, "logits this flat would hide a fault"
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


@every_variant
def test_their_tensors_come_back_to_the_bit(family: str, keys: dict[str, Any]) -> None:
    theirs = their_model(family, **keys)
    run = our_run(theirs)
    back = back_to_theirs(our_tensors(theirs, run), run)
    expected = in_a_file(theirs)
    assert back.keys() == expected.keys() - FAMILIES[family].aliases(run.megastable.model).keys()
    for name, tensor in back.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.is_contiguous()


@every_variant
def test_what_a_file_may_hold_twice_is_known(family: str, keys: dict[str, Any]) -> None:
    theirs = their_model(family, **keys)
    run = our_run(theirs)
    aliases = FAMILIES[family].aliases(run.megastable.model)
    table = {part.name for mapped in FAMILIES[family].tensors(run.megastable.model) for part in mapped.parts}
    weights = in_a_file(theirs)
    assert weights.keys() == table | aliases.keys()
    for name, original in aliases.items():
        assert torch.equal(weights[name], weights[original])


@every_variant
def test_the_written_config_is_read_as_the_same_model(family: str, keys: dict[str, Any]) -> None:
    theirs = their_model(family, **keys)
    model = our_run(theirs).megastable.model
    written = FAMILIES[family].config_of(model)
    config = type(theirs.config).from_dict(written)
    again = our_run(type(theirs)(config)).megastable.model
    assert again == model
    assert config.architectures == [type(theirs).__name__]
