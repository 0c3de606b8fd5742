"""Every tensor of every family turned into theirs and back, to the bit, and what is refused on the way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.config import ModelConfig
from megastable.core.errors import UserError
from megastable.core.families.family import Family, MappedTensor, Part
from megastable.interop.transforms import to_ours, to_theirs
from tests.unit.core.test_families import families_with_models


@given(families_with_models(), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_there_and_back_is_the_same_to_the_bit(drawn: tuple[Family, ModelConfig], dtype: torch.dtype) -> None:
    family, model = drawn
    for mapped in family.tensors(model):
        ours = torch.arange(torch.Size(mapped.shape).numel()).view(mapped.shape).to(dtype)
        theirs = to_theirs(ours, mapped)
        assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == {
            part.name: mapped.shape_of(part) for part in mapped.parts
        }
        back = to_ours(theirs, mapped)
        assert back.dtype == dtype
        assert torch.equal(back, ours), mapped.name


MAPPED = MappedTensor("ours", (3, 2), (Part("a", ((2, 3), (0, 1)), transposed=True), Part("b", ((1, 2),))))


def test_rows_by_hand() -> None:
    theirs = to_theirs(torch.tensor([[0, 1], [2, 3], [4, 5]]), MAPPED)
    assert theirs["a"].tolist() == [[4, 0], [5, 1]]
    assert theirs["b"].tolist() == [[2, 3]]


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"b": torch.zeros(1, 2)}, "no tensor a"),
        ({"a": torch.zeros(2, 2)}, "no tensor b"),
        ({"a": torch.zeros(2, 2), "b": torch.zeros(2, 1)}, r"b has the shape \(2, 1\), and must have \(1, 2\)"),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(theirs: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(UserError, match=says):
        to_ours(theirs, MAPPED)


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("second", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_of_several_formats_keep_all_their_bits(first: torch.dtype, second: torch.dtype) -> None:
    theirs = {
        "a": torch.full((2, 2), torch.finfo(first).eps + 1, dtype=first),
        "b": torch.full((1, 2), torch.finfo(second).eps + 1, dtype=second),
    }
    back = to_theirs(to_ours(theirs, MAPPED), MAPPED)
    for name, tensor in theirs.items():
        assert torch.equal(back[name].double(), tensor.double()), name
