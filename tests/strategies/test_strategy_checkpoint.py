"""One checkpoint for many roles and optimizers, on this layout and on others."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from lightning_verl import Actor, Critic, HybridStrategy
from lightning_verl.strategies.checkpoint import CheckpointMismatchError, _SafeUnpickler
from lightning_verl.testing import run_ranks, tiny_model, tiny_rollouts


def roles(options: dict[str, Any], seed: int = 0) -> tuple[Fabric, dict[str, Any]]:
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(**options))
    fabric.launch()
    state: dict[str, Any] = {}
    # 131 tokens do not divide over tensor ranks, nor over shards.
    models = [tiny_model(seed=seed + number, vocab_size=131) for number in range(2)]
    for role, module in (("actor", Actor(models[0])), ("critic", Critic(models[1]))):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        state[role], state[f"{role}_optimizer"] = fabric.setup(module, optimizer)
    state["steps"] = 0
    return fabric, state


def held(fabric: Fabric) -> list[str]:
    return [role for role in ("actor", "critic") if fabric.strategy.layout(role).holds(fabric.global_rank)]


def train(fabric: Fabric, state: dict[str, Any]) -> None:
    """One step on all rows; every rank has all of them, so the mean over data ranks is the same for any number."""
    for role in held(fabric):
        output = state[role](tiny_rollouts())
        fabric.backward((output[0] if role == "actor" else output).square().sum())
        state[f"{role}_optimizer"].step()
        state[f"{role}_optimizer"].zero_grad()
    state["steps"] += 1


def figures(state: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [state["actor"](tiny_rollouts())[0], state["critic"](tiny_rollouts())]


def write(folder: str, options: dict[str, Any]) -> list[torch.Tensor]:
    fabric, state = roles(options)
    for _ in range(2):
        train(fabric, state)
    fabric.save(folder, state)
    saved = figures(state)
    train(fabric, state)
    return [*saved, *figures(state)]


def read_and_go_on(folder: str, options: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor], int, int]:
    fabric, state = roles(options, seed=7)
    rest = fabric.load(folder, state)
    loaded = figures(state)
    version = fabric.strategy.weight_version("actor")
    train(fabric, state)
    return loaded, figures(state), state["steps"], version + len(rest)


@pytest.mark.parametrize(
    ("writers", "write_options", "readers", "read_options"),
    [
        (1, {}, 2, {"mesh_shape": (1, 2, 1, 1)}),
        (4, {"mesh_shape": (2, 2, 1, 1), "parallelism_config": {"critic": {"dp": 4}}}, 2, {}),
        (2, {"parallelism_config": {"actor": {"tp": 2}, "critic": {"dp": 1}}}, 1, {}),
    ],
    ids=["1-to-tensor2", "data2xtensor2-to-data2", "mixed2-to-1"],
)
def test_a_checkpoint_loads_on_another_layout(
    tmp_path: Path, writers: int, write_options: dict[str, Any], readers: int, read_options: dict[str, Any]
) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(write, writers, folder, write_options)[0]
    for loaded, after, steps, version in run_ranks(read_and_go_on, readers, folder, read_options):
        assert (steps, version) == (3, 2)
        torch.testing.assert_close(loaded, saved[:2], atol=1e-5, rtol=1e-5)
        # Adam turns rounding of tiny gradients into steps of its own size, 1e-3: the next step is compared to 1e-4.
        torch.testing.assert_close(after, saved[2:], atol=1e-4, rtol=1e-4)
    assert not list(tmp_path.glob("*.incomplete"))


def read_and_write(source: str, target: str, options: dict[str, Any]) -> list[torch.Tensor]:
    fabric, state = roles(options, seed=7)
    fabric.load(source, state)
    fabric.save(target, state)
    return figures(state)


def test_a_checkpoint_goes_from_four_ranks_to_two_to_one_and_back(tmp_path: Path) -> None:
    stops: list[tuple[int, dict[str, Any]]] = [
        (4, {"mesh_shape": (2, 2, 1, 1)}),
        (2, {"mesh_shape": (2, 1, 1, 1), "hybrid_engine_config": {"rollout_tp": 2}}),
        (1, {}),
        (4, {"mesh_shape": (4, 1, 1, 1), "hybrid_engine_config": {"rollout_tp": 2}}),
    ]
    folders = [str(tmp_path / f"stop{number}") for number in range(len(stops))]
    saved = run_ranks(write, stops[0][0], folders[0], stops[0][1])[0]
    for number, (ranks, options) in enumerate(stops[1:], start=1):
        for loaded in run_ranks(read_and_write, ranks, folders[number - 1], folders[number], options):
            torch.testing.assert_close(loaded, saved[:2], atol=1e-5, rtol=1e-5)
    for loaded, after, steps, version in run_ranks(read_and_go_on, 2, folders[-1], {"mesh_shape": (1, 2, 1, 1)}):
        assert (steps, version) == (3, 2)
        torch.testing.assert_close(loaded, saved[:2], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(after, saved[2:], atol=1e-4, rtol=1e-4)


def test_whether_an_optimizer_is_fused_is_not_read_from_a_checkpoint(tmp_path: Path) -> None:
    """It depends on the meshes here; the weight decay is read."""
    fabric, state = roles({})
    state["actor_optimizer"].param_groups[0].update(fused=True, weight_decay=0.5)
    train(fabric, state)
    fabric.save(str(tmp_path / "checkpoint"), state)
    fabric, state = roles({})
    fabric.load(str(tmp_path / "checkpoint"), state)
    group = state["actor_optimizer"].param_groups[0]
    assert (group["fused"], group["weight_decay"]) == (None, 0.5)


APART = {"mesh_shape": (2, 1, 1, 1), "parallelism_config": {"critic": {"dp": 1, "ranks": [2]}}}


def write_apart(folder: str) -> dict[str, torch.Tensor]:
    """Save after two steps; the values of the roles that this rank holds, after a third one."""
    fabric, state = roles(APART)
    for _ in range(2):
        train(fabric, state)
    fabric.save(folder, state)
    train(fabric, state)
    with torch.no_grad():
        outputs = {role: state[role](tiny_rollouts()) for role in held(fabric)}
    return {role: output[0] if role == "actor" else output for role, output in outputs.items()}


def read_apart(folder: str) -> int:
    """Load where the role lies elsewhere."""
    fabric, state = roles(APART, seed=7)
    fabric.load(folder, state)
    return sum(fabric.strategy.weight_version(role) for role in ("actor", "critic"))


def test_a_role_on_ranks_of_its_own_is_saved_and_loads_onto_the_mesh_and_back(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(write_apart, 3, folder)
    assert [sorted(values) for values in saved] == [["actor"], ["actor"], ["critic"]]
    for _, after, steps, version in run_ranks(read_and_go_on, 2, folder, {}):
        assert (steps, version) == (3, 2)
        torch.testing.assert_close(after, [saved[0]["actor"], saved[2]["critic"]], atol=1e-4, rtol=1e-4)
    assert run_ranks(read_apart, 3, folder) == [4] * 3, "all ranks know how many steps both roles have taken"


def load_another_critic(folder: str) -> str:
    fabric, state = roles(APART)
    fabric.save(folder, state)
    wide = fabric.setup_module(Critic(tiny_model(hidden_size=96) if fabric.global_rank == 2 else tiny_model()))
    with pytest.raises(CheckpointMismatchError) as caught:
        fabric.load(folder, {"critic": wide})
    return str(caught.value)


def test_what_does_not_fit_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    first, second, third = run_ranks(load_another_critic, 3, str(tmp_path / "checkpoint"))
    assert "critic.model.embed_tokens.weight has shape (128, 96) here and has shape (131, 64) there" in third
    assert first == second == f"on rank 2: {third}"


def test_a_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    fabric, state = roles({})
    for steps in (1, 2):
        state["steps"] = steps
        fabric.save(tmp_path / "checkpoint", state)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    fabric.load(tmp_path / "checkpoint", state)
    assert state["steps"] == 2


def test_another_architecture_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    fabric, state = roles({})
    fabric.save(tmp_path / "checkpoint", state)
    wide = Actor(tiny_model(hidden_size=96))
    module = fabric.setup_module(wide)
    before = {name: value.clone() for name, value in wide.state_dict().items()}
    with pytest.raises(
        CheckpointMismatchError, match=r"architecture: actor\.model.* has shape .*96.* here and has shape"
    ):
        fabric.load(tmp_path / "checkpoint", {"actor": module})
    assert all(torch.equal(value, before[name]) for name, value in wide.state_dict().items())


def test_a_deeper_model_is_not_cut_to_a_shallower_one(tmp_path: Path) -> None:
    fabric, state = roles({})
    fabric.save(tmp_path / "checkpoint", state)
    shallow = fabric.setup_module(Actor(tiny_model(num_hidden_layers=1)))
    with pytest.raises(CheckpointMismatchError, match=r"holds actor\.model\.model\.layers\.1\..* no place for"):
        fabric.load(tmp_path / "checkpoint", {"actor": shallow})


def save_into_a_file(folder: str) -> str:
    fabric, state = roles({})
    (Path(folder) / "file").touch()
    with pytest.raises(OSError) as caught:  # noqa: PT011 - its text differs from rank to rank
        fabric.save(Path(folder) / "file" / "checkpoint", state)
    return str(caught.value)


def test_a_write_that_fails_on_rank_0_fails_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(save_into_a_file, 2, str(tmp_path))
    assert "Not a directory" in first
    assert second == f"rank 0 could not write the checkpoint: {first}"


def test_missing_names_and_folders_are_named(tmp_path: Path) -> None:
    fabric, state = roles({})
    with pytest.raises(FileNotFoundError, match="No whole checkpoint"):
        fabric.load(tmp_path / "nothing", state)
    fabric.save(tmp_path / "checkpoint", {"actor": state["actor"]})
    with pytest.raises(CheckpointMismatchError, match=r"holds \['actor', .*\] but not \['critic'\]"):
        fabric.load(tmp_path / "checkpoint", {"actor": state["actor"], "critic": state["critic"]})
    rest = fabric.load(tmp_path / "checkpoint", {"actor": state["actor"], "critic": state["critic"]}, strict=False)
    assert rest == {}
    with pytest.raises(ValueError, match="whose module is not in the state"):
        fabric.save(tmp_path / "other", {"actor_optimizer": state["actor_optimizer"]})


def test_metadata_builds_nothing_but_descriptions_of_tensors() -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return eval, ("1 + 1",)

    with pytest.raises(pickle.UnpicklingError, match="eval, which no checkpoint needs"):
        _SafeUnpickler(io.BytesIO(pickle.dumps(Attack()))).load()
