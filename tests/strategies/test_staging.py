"""What a strategy with stages refuses before any process is launched."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric import Fabric

from lightning_verl import SFT, Actor, AsyncRolloutDataset, HybridDataFlow, HybridStrategy, RLTrainer
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"enable_3d_hybrid": False},
            r"enable_3d_hybrid=False with 2 pipeline stages: it rolls out in the",
        ),
        ({"offload_parameters": True}, r"offload_parameters=True, but the actor has 2 pipeline stages"),
    ],
)
def test_options_that_a_pipeline_excludes(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fabric(accelerator="cpu", devices=2, strategy=HybridStrategy((1, 1, 2, 1), **options))


def test_an_unknown_schedule_says_which_there_are() -> None:
    with pytest.raises(ValueError, match=r"pipeline_schedule='zero'; it takes '1f1b', 'interleaved', 'gpipe'"):
        HybridStrategy(pipeline_schedule="zero")  # type: ignore[arg-type]


def test_a_trainer_refuses_fewer_rows_than_stages() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=HybridStrategy((1, 1, 2, 1)))
    flow = HybridDataFlow(Actor(tiny_model(), tokenizer=char_tokenizer()))
    data = AsyncRolloutDataset([{"prompt": "a", "response": "b"}], tokenizer=char_tokenizer(), max_prompt_length=4)
    with pytest.raises(ValueError, match=r"RLTrainer: .*1 x 1 / 1 leaves 1 rows.*fewer micro-batches than its 2 pip"):
        RLTrainer(fabric, flow, SFT(), data, rollout_batch_size=1)


def too_deep() -> str:
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy((1, 1, 4, 1)))
    fabric.launch()
    with pytest.raises(ValueError, match="fewer than the 4 stages") as error:
        HybridDataFlow(Actor(tiny_model())).setup(fabric)
    return str(error.value)


def test_more_stages_than_layers_are_refused_on_every_rank() -> None:
    for text in run_ranks(too_deep, 4):
        assert text.startswith("Qwen3ForCausalLM has 2 layers, fewer than the 4 stages of its pipeline")
