"""Which engine ``engine="auto"`` is, and what the log says of it."""

from __future__ import annotations

import io
import logging
from typing import Any, get_args

import pytest
import torch
from lightning.fabric import Fabric
from lightning_utilities.core import rank_zero
from transformers import BloomConfig, BloomForCausalLM, Olmo2Config, Olmo2ForCausalLM

from lightning_verl import Actor, HybridStrategy, SamplingParams
from lightning_verl.rollout.engines import build_engine
from lightning_verl.rollout.native import NativeEngine
from lightning_verl.rollout.transformers import TransformersEngine
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model
from lightning_verl.testing.tiny import Family

BLOOM = "BloomForCausalLM is rolled out with engine='transformers': "
LONG = (
    "LlamaForCausalLM is rolled out with engine='transformers': its rotary embedding (dynamic) takes frequencies by "
    "the longest sample of a batch, so that a sample would depend on the others."
)
OLMO = (
    "Olmo2ForCausalLM is rolled out with engine='transformers': "
    "the native engine is not tested with the family 'olmo2'."
)


def bloom() -> Any:
    """Attends by itself, with biases by distance."""
    return BloomForCausalLM(BloomConfig(vocab_size=128, hidden_size=16, n_layer=1, n_head=2))


def olmo() -> Any:
    """Could run natively, but no test compares it."""
    return Olmo2ForCausalLM(
        Olmo2Config(
            vocab_size=128,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def long_llama() -> Any:
    """Its frequencies grow with the longest sample."""
    return tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Lightning's log gets, which rank 0 shows by default."""
    found: list[str] = []
    monkeypatch.setattr(rank_zero.log, "handle", lambda record: found.append(record.getMessage()))
    return found


@pytest.mark.parametrize("family", get_args(Family))
def test_auto_is_native_for_every_tested_family(family: Family, lines: list[str]) -> None:
    actor = Actor(tiny_model(family), tokenizer=char_tokenizer())
    assert type(actor.engine) is NativeEngine
    built = build_engine("auto", tiny_model(family), pad_token_id=0, eos_token_ids=[2], tokenizer=None)
    assert type(built) is NativeEngine
    assert lines == []


def test_auto_is_native_under_an_adapter_too(lines: list[str]) -> None:
    adapter = {"r": 2, "alpha": 4, "target_modules": ["q_proj"]}
    actor = Actor(tiny_model("llama"), tokenizer=char_tokenizer(), lora_config=adapter)
    assert type(actor.engine) is NativeEngine
    assert lines == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (bloom, BLOOM + "its attention does not go through the attention interface of transformers."),
        (olmo, OLMO),
        (long_llama, LONG),
    ],
    ids=["cannot", "not tested", "dynamic"],
)
def test_auto_is_transformers_for_others_and_says_why_once(make: Any, said: str, lines: list[str]) -> None:
    actor = Actor(make(), tokenizer=char_tokenizer())
    assert type(actor.engine) is TransformersEngine
    assert type(actor.engine) is TransformersEngine
    assert lines == [said]


def test_an_engine_that_is_asked_for_says_nothing(lines: list[str]) -> None:
    assert type(Actor(tiny_model(), tokenizer=char_tokenizer(), engine="transformers").engine) is TransformersEngine
    assert type(Actor(olmo(), tokenizer=char_tokenizer(), engine="native").engine) is NativeEngine
    assert lines == []


def said_by_default() -> str:
    """What Lightning's own handler writes over two rollouts, in a process that nobody gave a log to."""
    log = rank_zero.log
    while not log.handlers and log.parent is not None:
        log = log.parent
    (handler,) = log.handlers
    assert log.name.startswith("lightning")
    assert isinstance(handler, logging.StreamHandler)
    written = io.StringIO()
    handler.setStream(written)
    strategy = HybridStrategy()
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    actor = Actor(olmo(), tokenizer=char_tokenizer())
    fabric.setup_module(actor)
    for _ in range(2):
        with strategy.rollout(actor) as engine:
            engine.generate([[3, 4]], SamplingParams(max_new_tokens=2))
    return "".join(line for line in written.getvalue().splitlines(keepends=True) if "rolled out" in line)


def test_the_line_is_seen_by_default_on_rank_0_alone() -> None:
    assert run_ranks(said_by_default, 2) == [OLMO + "\n", ""]
