"""The families as data: what each can express, tables with every row in one place, and config.json both ways."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megastable.config import ConfigError, ModelConfig
from megastable.config.stages import model_parts, model_shape
from megastable.core.errors import UserError
from megastable.core.families.family import Family
from megastable.core.families.registry import FAMILIES, expressing_families, nearest_family, read_config
from megastable.core.families.their_config import NotExpressibleError
from megastable.core.layers import num_parameters
from tests.support.tiny_run import tiny_run

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@st.composite
def models(draw: st.DrawFn, family: Family) -> ModelConfig:
    """Any model of the family, of small sizes."""
    heads = draw(st.integers(1, 6))
    hidden = heads * draw(st.sampled_from([2, 4, 8]))
    section: dict[str, Any] = {
        "family": family.name,
        "num_layers": draw(st.integers(1, 3)),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": draw(st.integers(1, 40)),
        "seq_length": draw(st.integers(1, 9)),
        "vocab_size": draw(st.integers(1, 50)),
        "vocab_padding_multiple": 1,
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5, 0.1])),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "num_key_value_heads": draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
    }
    for key, switch in family.switches.items():
        section[key] = draw(st.sampled_from([switch.preset, *(switch.others or ())]))
    if section["position_embedding"] == "rotary":
        section["rotary_base"] = draw(st.sampled_from([100.0, 10000.0]))
        fraction = draw(st.sampled_from([1.0, 0.5, 0.25])) if family.switches["rotary_fraction"].others is None else 1.0
        section["rotary_fraction"] = fraction
    model = ModelConfig(**section)
    # Of a demand that no switch has: the width that the class has, and no grouped heads.
    broken = {contradiction.key for contradiction in family.contradictions(model)}
    mended = {"num_key_value_heads": heads, "ffn_hidden_size": 4 * hidden}
    model = ModelConfig(**{**section, **{key: mended[key] for key in broken}})
    assume(family.contradictions(model) == [])
    return model


@st.composite
def families_with_models(draw: st.DrawFn) -> tuple[Family, ModelConfig]:
    """A family, and a model of it."""
    family = draw(st.sampled_from(list(FAMILIES.values())))
    return family, draw(models(family))


@given(families_with_models())
def test_a_table_has_every_row_of_every_weight_once(drawn: tuple[Family, ModelConfig]) -> None:
    family, model = drawn
    table = list(family.tensors(model))
    assert len({mapped.name for mapped in table}) == len(table)
    their_names = [part.name for mapped in table for part in mapped.parts]
    assert len(set(their_names)) == len(their_names)
    elements = 0
    for mapped in table:
        rows = [row for part in mapped.parts for start, stop in part.rows for row in range(start, stop)]
        assert sorted(rows) == list(range(mapped.shape[0])), mapped.name
        of_theirs = [mapped.shape_of(part) for part in mapped.parts]
        assert all(len(shape) == len(mapped.shape) for shape in of_theirs)
        elements += mapped.shape[0] * (mapped.shape[1] if len(mapped.shape) == 2 else 1)
    assert elements == num_parameters(model_shape(model), model_parts(model))


@given(families_with_models())
def test_a_written_config_is_read_as_the_same_model(drawn: tuple[Family, ModelConfig]) -> None:
    family, model = drawn
    written = json.loads(json.dumps(family.config_of(model)))
    read = read_config(written)
    section = {"num_key_value_heads": model.num_attention_heads, **read.section, "vocab_padding_multiple": 1}
    again = ModelConfig(**section)
    # Of a number of heads that is left to the default, the number counts.
    same = {"num_key_value_heads": model.kv_heads, "rotary_base": again.rotary_base}
    if model.position_embedding == "rotary":
        same["rotary_base"] = model.rotary_base
    expected = {**model.model_dump(), **same}
    # One number stands for the dropouts that a class has several of; Llama's has one, all others all.
    assert again.model_dump() == expected
    assert read.remarks == ()


@every_family
def test_a_family_sets_what_is_not_given_and_refuses_what_contradicts_it(family: Family) -> None:
    run = tiny_run(megastable__model__family=family.name)
    model = run.megastable.model
    assert {key: getattr(model, key) for key in family.switches} == family.presets()
    assert family in expressing_families(model)
    with pytest.raises(ConfigError) as caught:
        tiny_run(megastable__model__family=family.name, megastable__model__qk_norm=True)
    (fault,) = caught.value.faults
    assert (fault.path, fault.value) == ("megastable.model.qk_norm", True)
    assert fault.message == f'must be false; "family": "{family.name}" is {family.class_name} of transformers'


def test_an_unknown_family_is_refused_with_those_that_there_are() -> None:
    for value in ("gpt5", 3, ["gpt2"]):
        with pytest.raises(ConfigError) as caught:
            tiny_run(megastable__model__family=value)
        (fault,) = caught.value.faults
        assert fault.path == "megastable.model.family"
        assert fault.message == "must be one of 'gpt2', 'bloom', 'llama', 'gpt_neox'"


def test_the_default_model_is_a_gpt_neox_and_the_nearest_family_says_what_differs() -> None:
    assert [family.name for family in expressing_families(tiny_run().megastable.model)] == ["gpt_neox"]
    odd = tiny_run(megastable__model__qk_norm=True, megastable__model__attention_logit_cap=30.0).megastable.model
    family, contradictions = nearest_family(odd)
    assert family.name == "gpt_neox"
    assert [str(contradiction) for contradiction in contradictions] == [
        "qk_norm is true and must be false",
        "attention_logit_cap is 30.0 and must be null",
    ]
    # BLOOM has an embedding norm and other positions, and is as far away.
    family, contradictions = nearest_family(tiny_run(megastable__model__embedding_norm=True).megastable.model)
    assert (family.name, [contradiction.key for contradiction in contradictions]) == ("gpt_neox", ["embedding_norm"])


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu': must be gelu_new or"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True: must be false"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True: must be false"),
    ("gpt2", {"n_layer": "12"}, "n_layer is '12': must be a whole number from 1"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is True"),
    ("bloom", {"layer_norm_epsilon": True}, "layer_norm_epsilon is True: must be a finite number"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu': must be silu or swish"),
    ("llama", {"attention_bias": True}, "attention_bias is True and mlp_bias is not"),
    ("llama", {"head_dim": 64}, "head_dim is 64: must be hidden_size / num_attention_heads (4096 / 32)"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters.rope_type is 'linear'"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_type is 'llama3'"),
    ("llama", {"rope_parameters": 3}, "rope_parameters is 3: must be an object"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes': must be true or false"),
    ("gpt_neox", {"attention_bias": False}, "attention_bias is False: must be true"),
    ("gpt_neox", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
)  # fmt: skip


@pytest.mark.parametrize(("family", "keys", "says"), REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(family: str, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(NotExpressibleError) as caught:
        read_config({"model_type": FAMILIES[family].model_type, **keys})
    assert str(caught.value).startswith("config.json: ") and says in str(caught.value)


def test_another_type_of_model_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UserError, match="model_type is 't5': must be one of gpt2, bloom, llama, gpt_neox"):
        read_config({"model_type": "t5"})


def test_older_spellings_are_read() -> None:
    read = read_config({"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 99}).section
    assert (read["rotary_fraction"], read["rotary_base"]) == (0.5, 99.0)
    read = read_config({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None}).section
    assert (read["rotary_fraction"], read["rotary_base"]) == (1.0, 5e5)
    read = read_config({"model_type": "bloom", "n_embed": 96, "num_hidden_layers": 5, "num_attention_heads": 6}).section
    assert (read["hidden_size"], read["num_layers"], read["num_attention_heads"]) == (96, 5, 6)


def test_what_is_left_out_is_said() -> None:
    dropouts = {"embd_pdrop": 0.0, "attn_pdrop": 0.1, "resid_pdrop": 0.1}
    read = read_config({"model_type": "gpt2", **dropouts})
    assert read.section["dropout"] == 0.0
    (remark,) = read.remarks
    assert "embd_pdrop 0.0, attn_pdrop 0.1, resid_pdrop 0.1" in remark
    (remark,) = read_config({"model_type": "bloom"}).remarks
    assert "seq_length is 2048" in remark
