"""Weights in stages go to where the rollout wants them, to checkpoints, and to folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from test_invariance import make_experience, split, whole
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_verl import SFT, Actor, Critic, HybridDataFlow, HybridStrategy
from lightning_verl.algorithms.losses import Normalizer
from lightning_verl.data.experience import Experience
from lightning_verl.strategies.checkpoint import CheckpointMismatchError
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model


def make_flow(family: Any, options: Any, seed: int = 0, layers: int = 4) -> HybridDataFlow:
    """An actor and a critic with AdamW, set up in a layout."""
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(**options))
    fabric.launch()
    model = tiny_model(family, seed=seed, num_hidden_layers=layers)
    actor = Actor(model, tokenizer=char_tokenizer(), learning_rate=1e-3)
    critic = Critic(tiny_model(family, seed=seed + 1, num_hidden_layers=layers), learning_rate=1e-3)
    flow = HybridDataFlow(actor, critic, max_tokens_per_micro_batch=30)
    flow.setup(fabric)
    flow.setup_optimizers()
    return flow


def train(flow: HybridDataFlow) -> None:
    """One step of both roles."""
    layout, rank = flow.strategy.layout("actor"), flow.strategy.data_rank("actor")
    own = [g * 2 + sample for g in split(5, layout.data_size, rank) for sample in range(2)]
    experience = make_experience().select(own)
    algorithm = SFT()
    algorithm.compute_advantages(experience, flow.strategy.group("actor", "scores"))
    algorithm.update(flow, experience)
    flow.train("critic", experience, value_to_one)


def value_to_one(critic: Any, rows: Experience, normalizer: Normalizer) -> tuple[Tensor, dict[str, Tensor]]:
    values = critic(rows.rollout)
    return ((values - 1)[rows.mask] ** 2).sum() / normalizer.tokens * normalizer.data_parallel_size, {}


def state_of(flow: HybridDataFlow) -> dict[str, Any]:
    roles = ("actor", "critic")
    return {**flow.modules, **{f"{role}_optimizer": flow.optimizers[role] for role in roles}, "steps": 1}


def weights(flow: HybridDataFlow) -> dict[str, Tensor]:
    found = {}
    for role in ("actor", "critic"):
        state = whole(flow.modules[role], flow.strategy.group(role, "pipeline"))
        found.update({f"{role}.{name}": value for name, value in state.items()})
    return found


# ---- rollouts --------------------------------------------------------------------------------------------------------


def rolled_out(family: Any, options: Any) -> tuple[dict[str, Tensor], int]:
    """The rollout's weights on this rank, and the bytes that it received for them."""
    flow = make_flow(family, options)
    with flow.strategy.rollout(flow.modules["actor"]):
        view = flow.strategy._rollouts._engine.module  # type: ignore[union-attr]
        held = {name: parameter.detach().clone() for name, parameter in view.named_parameters()}
    report = flow.strategy.reshard_report
    assert report is not None
    return held, report.received_bytes


def nbytes(state: dict[str, Tensor], *parts: str) -> int:
    return sum(value.nbytes for name, value in state.items() if any(part in name for part in parts))


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_each_stage_receives_what_the_other_holds_and_no_more(family: Any) -> None:
    expected = {name: p.detach() for name, p in tiny_model(family, num_hidden_layers=4).named_parameters()}
    made = run_ranks(rolled_out, 2, family, {"mesh_shape": (1, 1, 2, 1)})
    for held, _ in made:
        torch.testing.assert_close(held, expected, rtol=0, atol=0)
    # The head weighs a quarter of a layer, so two layers a stage. A tied embedding is there on both already.
    first = nbytes(expected, "layers.0.", "layers.1.") + (family == "qwen3") * nbytes(expected, "embed_tokens")
    last = nbytes(expected, "layers.2.", "layers.3.", "model.norm", "lm_head")
    assert [received for _, received in made] == [last, first]


@pytest.mark.parametrize(
    ("ranks", "family", "options"),
    [
        (4, "qwen3", {"mesh_shape": (2, 1, 2, 1)}),
        (4, "qwen2", {"mesh_shape": (2, 1, 2, 1)}),
        (4, "qwen3_moe", {"mesh_shape": (1, 1, 2, 2), "hybrid_engine_config": {"rollout_tp": 1}}),
        (4, "qwen3", {"mesh_shape": (2, 1, 2, 1), "pipeline_schedule": "interleaved"}),
    ],
)
def test_whole_copies_are_the_trained_weights(ranks: int, family: Any, options: Any) -> None:
    expected = {name: p.detach() for name, p in tiny_model(family, num_hidden_layers=4).named_parameters()}
    expert = options["mesh_shape"][3]
    for rank, (held, _) in enumerate(run_ranks(rolled_out, ranks, family, options)):
        for name, value in held.items():
            part = expected[name].chunk(expert)[rank % expert] if "experts." in name else expected[name]
            torch.testing.assert_close(value, part, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("mesh", [(2, 1, 2, 1), (1, 2, 2, 1)])
def test_cut_copies_are_the_trained_weights(mesh: Any) -> None:
    expected = {name: p.detach() for name, p in tiny_model("qwen3", num_hidden_layers=4).named_parameters()}
    options = {"mesh_shape": mesh, "hybrid_engine_config": {"rollout_tp": 2}}
    made = run_ranks(rolled_out, 4, "qwen3", options)
    for name, value in expected.items():
        parts = [held[name] for held, _ in made]
        dims = [dim for dim in range(value.dim()) if parts[0].shape[dim] != value.shape[dim]]
        if not dims:
            for part in parts:
                torch.testing.assert_close(part, value, rtol=0, atol=0, msg=name)
            continue
        chunks = value.chunk(2, dim=dims[0])
        whereabouts = [next(i for i, chunk in enumerate(chunks) if torch.equal(part, chunk)) for part in parts]
        assert sorted(whereabouts) == [0, 0, 1, 1], name


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def write(folder: str, family: Any, options: Any) -> list[dict[str, Tensor]]:
    flow = make_flow(family, options)
    train(flow)
    saved = weights(flow)
    flow.fabric.save(folder, state_of(flow))
    train(flow)
    return [saved, weights(flow)]


def read_and_go_on(folder: str, family: Any, options: Any) -> list[dict[str, Tensor]]:
    flow = make_flow(family, options, seed=7)
    flow.fabric.load(folder, state_of(flow))
    loaded = weights(flow)
    train(flow)
    return [loaded, weights(flow)]


@pytest.mark.parametrize(
    ("family", "writers", "write_options", "readers", "read_options"),
    [
        ("qwen2", 2, {"mesh_shape": (1, 1, 2, 1)}, 1, {}),
        ("qwen2", 1, {}, 4, {"mesh_shape": (2, 1, 2, 1)}),
        ("qwen3", 4, {"mesh_shape": (1, 2, 2, 1)}, 4, {"mesh_shape": (1, 1, 4, 1)}),
        ("qwen3", 4, {"mesh_shape": (2, 1, 2, 1), "pipeline_schedule": "interleaved"}, 2, {}),
    ],
    ids=["stages2-to-1", "1-to-data2xstages2", "tensor2xstages2-to-stages4", "interleaved-to-data2"],
)
def test_a_checkpoint_loads_on_other_stages(
    tmp_path: Path, family: Any, writers: int, write_options: Any, readers: int, read_options: Any
) -> None:
    folder = str(tmp_path / "checkpoint")
    saved, after = run_ranks(write, writers, folder, family, write_options)[0]
    loaded, next_step = run_ranks(read_and_go_on, readers, folder, family, read_options)[0]
    assert len(saved) == len(loaded) > 30
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    # Adam turns rounding of tiny gradients into steps of its own size, 1e-3: the next step is compared to 1e-4.
    torch.testing.assert_close(next_step, after, rtol=1e-4, atol=1e-4)


def load_deeper(folder: str) -> str:
    flow = make_flow("qwen3", {"mesh_shape": (1, 1, 2, 1)}, layers=2)
    with pytest.raises(CheckpointMismatchError) as error:
        flow.fabric.load(folder, state_of(flow))
    return str(error.value)


def test_a_deeper_model_is_not_cut_to_the_layers_of_the_stages_here(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    run_ranks(write, 1, folder, "qwen3", {})
    for text in run_ranks(load_deeper, 2, folder):
        assert "there is no place for here" in text
        assert "layers.2." in text


def save_folder(folder: str, options: Any) -> None:
    make_flow("qwen2", options).save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()


def test_a_folder_holds_the_layers_of_all_stages(tmp_path: Path) -> None:
    run_ranks(save_folder, 4, str(tmp_path / "model"), {"mesh_shape": (2, 1, 2, 1)})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = tiny_model("qwen2", num_hidden_layers=4).state_dict()
    torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=0, atol=0)
