"""The native engine on several ranks: experts divided over them, and caches of one size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_verl.parallel.expert import dispatch_experts
from lightning_verl.rollout.native import NativeEngine, NativeOptions
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.testing import run_ranks, tiny_model

SIZES = {"pad_token_id": 0, "eos_token_ids": [2]}
PROMPTS = [[5], list(range(20, 50)), [7, 8, 9], list(range(40, 57))]
SAMPLING = SamplingParams(n=2, max_new_tokens=20)


def divided_model() -> Any:
    """Each of two ranks has two of the four experts of every layer."""
    model = tiny_model("qwen3_moe")
    rank = dist.get_rank()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(parameter.detach()[2 * rank : 2 * rank + 2].clone()))
        dispatch_experts(experts, dist.group.WORLD, None)
    return model


def expert_ranks(rows: tuple[list[int], list[int]], options: dict[str, Any]) -> list[Any]:
    """Responses of the prompts of this rank, and how many passes of the model they took."""
    dist.init_process_group("gloo")
    own = rows[dist.get_rank()]
    model = divided_model()
    engine = NativeEngine(model, **SIZES, options=NativeOptions(**options), step_group=dist.group.WORLD)
    passes = 0

    def count(module: nn.Module, arguments: Any) -> None:
        nonlocal passes
        passes += 1

    model.base_model.register_forward_pre_hook(count)
    rollouts = engine.generate([PROMPTS[row] for row in own], SAMPLING, prompt_indices=own)
    return [rollouts.response_ids.tolist(), rollouts.lengths.tolist(), passes]


@pytest.mark.parametrize("rows", [([0, 1], [2, 3]), ([0, 1, 2, 3], []), ([], [1])], ids=str)
@pytest.mark.parametrize("blocks", [None, 6])
def test_divided_experts_sample_what_whole_ones_do(rows: tuple[list[int], list[int]], blocks: int | None) -> None:
    """Ranks take equally many steps, one without prompts and one that has to step back too."""
    options = {} if blocks is None else {"kv_cache_bytes": blocks * 2 * 2 * 2 * 16 * 16 * 4}
    whole = NativeEngine(tiny_model("qwen3_moe"), **SIZES)
    results = run_ranks(expert_ranks, 2, rows, options)
    assert results[0][2] == results[1][2] > 15
    for own, (ids, lengths, _) in zip(rows, results, strict=True):
        expected = whole.generate([PROMPTS[row] for row in own], SAMPLING, prompt_indices=own)
        assert ids == expected.response_ids.tolist()
        assert lengths == expected.lengths.tolist()


def refusing_ranks() -> str:
    dist.init_process_group("gloo")
    engine = NativeEngine(divided_model(), **SIZES, step_group=dist.group.WORLD)
    try:
        engine.generate([[5], []] if dist.get_rank() else [[5]], SAMPLING)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_a_rank_that_refuses_stops_the_others() -> None:
    first, second = run_ranks(refusing_ranks, 2)
    assert first == "RuntimeError: NativeEngine.generate: another rank of the step group refused its prompts."
    assert second.startswith("ValueError: NativeEngine.generate: prompt 1 is empty")


def cache_ranks(blocks: tuple[int | None, int | None]) -> list[Any]:
    dist.init_process_group("gloo")
    own = blocks[dist.get_rank()]
    size = None if own is None else own * 2 * 2 * 2 * 16 * 16 * 4
    options = NativeOptions(kv_cache_bytes=size, offload_kvcache=True)
    engine = NativeEngine(tiny_model("llama"), **SIZES, options=options, tensor_group=dist.group.WORLD)
    rollouts = engine.generate(PROMPTS, SAMPLING)
    report = engine.report
    assert report is not None
    return [rollouts.response_ids.tolist(), report]


@pytest.mark.parametrize("blocks", [(6, 20), (9, 7), (None, 6)])
def test_ranks_that_share_weights_agree_on_the_smaller_cache(blocks: tuple[int | None, int | None]) -> None:
    first, second = run_ranks(cache_ranks, 2, blocks)
    assert first == second
    assert first[1].cache_bytes == min(count for count in blocks if count) * 2 * 2 * 2 * 16 * 16 * 4
    assert first[1].preemptions > 0
    expected = NativeEngine(tiny_model("llama"), **SIZES).generate(PROMPTS, SAMPLING)
    assert torch.equal(torch.tensor(first[0]), expected.response_ids)
