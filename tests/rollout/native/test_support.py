"""Which models the native engine takes, and what it says of the others."""

from __future__ import annotations

from typing import Any, get_args

import peft
import pytest
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Lfm2Config,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_verl.rollout.native import NativeEngine
from lightning_verl.rollout.native.support import TESTED, check_native, native_problem, untested
from lightning_verl.testing import tiny_config, tiny_model
from lightning_verl.testing.tiny import Family


@pytest.mark.parametrize("family", get_args(Family))
def test_every_tiny_family_is_tested(family: Family) -> None:
    model = tiny_model(family, num_hidden_layers=1) if family not in ("gemma3",) else tiny_model(family)
    assert native_problem(model) is None
    assert untested(model) is None
    check_native(model)


def test_the_list_of_tested_families_is_that_of_the_tiny_models() -> None:
    assert set(TESTED) == {tiny_config(family).model_type for family in get_args(Family)}


def test_adapters_are_seen_through() -> None:
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert untested(model) is None
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert "puts tokens of its own in front" in refused(peft.get_peft_model(tiny_model("llama"), config))


def refused(model: Any) -> str:
    """What is said, by the engine as well."""
    problem = native_problem(model)
    assert problem is not None
    assert untested(model) == problem
    with pytest.raises(ValueError, match="NativeEngine cannot run") as error:
        NativeEngine(model, pad_token_id=0, eos_token_ids=[1])
    assert type(model).__name__ in str(error.value)
    assert "Use engine='transformers'" in str(error.value)
    return problem


def test_models_that_do_not_generate() -> None:
    small = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    assert "not a causal language model" in refused(T5ForConditionalGeneration(T5Config(**small)))
    assert "has no generate()" in refused(LlamaForSequenceClassification(tiny_config("llama", pad_token_id=0)))
    assert "not a causal language model" in refused(nn.Linear(2, 2))


def test_models_without_the_attention_interface() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2))
    assert "does not go through the attention interface" in refused(bloom)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))
    assert "does not go through the attention interface" in refused(mamba)


def test_layers_that_the_cache_does_not_hold() -> None:
    config = Lfm2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
    )
    problem = refused(AutoModelForCausalLM.from_config(config))
    assert "layers are of the types ['conv']" in problem
    chunked = tiny_model("llama")
    chunked.config.layer_types = ["full_attention", "chunked_attention"]
    assert "layers are of the types ['chunked_attention']" in refused(chunked)


def test_attention_that_looks_ahead() -> None:
    assert refused(tiny_model("gemma3", use_bidirectional_attention=True)) == "its attention is not causal"


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(("kind", "parameters"), [("dynamic", DYNAMIC), ("longrope", LONG)])
def test_frequencies_that_depend_on_the_batch(kind: str, parameters: dict[str, Any]) -> None:
    said = (
        f"its rotary embedding ({kind}) takes frequencies by the longest sample of a batch, so that a sample would "
        "depend on the others"
    )
    assert refused(tiny_model("llama", rope_parameters=parameters)) == said
    default = {"rope_type": "default", "rope_theta": 1e4}
    for layer_type in ("full_attention", "sliding_attention"):
        layers = {"full_attention": default, "sliding_attention": default, layer_type: parameters}
        assert refused(tiny_model("gemma3", rope_parameters=layers)) == said
    assert native_problem(tiny_model("gemma3")) is None
    for fixed in (default, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}):
        assert native_problem(tiny_model("llama", rope_parameters=fixed)) is None


def test_families_that_no_test_holds() -> None:
    model = tiny_model("llama")
    model.config.model_type = "other"
    assert native_problem(model) is None
    assert untested(model) == "the native engine is not tested with the family 'other'"
    check_native(model)
