"""Checkpoint: when it saves, what it keeps, and resuming from it."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from lightning_verl import GRPO, Actor, AsyncRolloutDataset, HybridDataFlow, HybridStrategy, RewardFunction, RLTrainer
from lightning_verl.callbacks import Checkpoint, PrefetchLoader, RewardEMA
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.strategies.dispatch import AgreedError
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model


class FakeTrainer:
    """Saves by making a folder; counts its saves."""

    def __init__(self, step: int = 0, world_size: int = 1, rank: int = 0, latest: int | None = None) -> None:
        self.global_step = step
        self.saved: list[str] = []
        self.fabric = SimpleNamespace(
            world_size=world_size,
            global_rank=rank,
            is_global_zero=rank == 0,
            broadcast=lambda value: value if latest is None else latest,
        )

    def save(self, path: Path) -> None:
        path.mkdir(parents=True)
        (path / "state.pt").touch()
        self.saved.append(path.name)


def run_steps(checkpoint: Checkpoint, trainer: FakeTrainer, steps: int) -> None:
    for _ in range(steps):
        trainer.global_step += 1
        checkpoint.on_step_end(trainer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- when it saves ----------------------------------------------------------------------------------------------------


def test_saves_every_n_steps_and_what_is_left_at_the_end(tmp_path):
    checkpoint, trainer = Checkpoint(tmp_path, every_n_steps=3, keep=None), FakeTrainer()
    checkpoint.on_run_start(trainer)
    run_steps(checkpoint, trainer, 7)
    checkpoint.on_run_end(trainer)
    assert trainer.saved == ["step-000003", "step-000006", "step-000007"]


def test_end_is_not_saved_twice(tmp_path):
    checkpoint, trainer = Checkpoint(tmp_path, every_n_steps=3), FakeTrainer()
    checkpoint.on_run_start(trainer)
    run_steps(checkpoint, trainer, 3)
    checkpoint.on_run_end(trainer)
    assert trainer.saved == ["step-000003"]


def test_run_that_finishes_no_step_saves_nothing(tmp_path):
    checkpoint, trainer = Checkpoint(tmp_path), FakeTrainer(step=50)
    checkpoint.on_run_start(trainer)
    checkpoint.on_run_exception(trainer, ValueError())
    checkpoint.on_run_end(trainer)
    assert trainer.saved == []


def test_save_at_end_may_be_turned_off(tmp_path):
    checkpoint, trainer = Checkpoint(tmp_path, every_n_steps=3, save_at_end=False), FakeTrainer()
    checkpoint.on_run_start(trainer)
    run_steps(checkpoint, trainer, 4)
    checkpoint.on_run_end(trainer)
    assert trainer.saved == ["step-000003"]


# --- when the run breaks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "error", "saved"),
    [
        (1, ValueError("no luck"), True),
        (1, KeyboardInterrupt(), True),
        (1, AgreedError("agreed"), True),
        (2, AgreedError("agreed"), True),
        (2, ValueError("no luck"), False),
        (2, KeyboardInterrupt(), False),
    ],
)
def test_saves_on_an_exception_where_all_ranks_take_part(tmp_path, caplog, world_size, error, saved):
    checkpoint, trainer = Checkpoint(tmp_path, every_n_steps=3), FakeTrainer(world_size=world_size)
    checkpoint.on_run_start(trainer)
    run_steps(checkpoint, trainer, 4)
    checkpoint.on_run_exception(trainer, error)
    assert trainer.saved == ["step-000003"] + ["step-000004"] * saved
    message = (
        f"not saved after {type(error).__name__} on rank 0, as not all ranks may take part; the last save is step 3"
    )
    assert (message in caplog.text) is not saved


def test_exception_right_after_a_save_saves_nothing_more(tmp_path):
    checkpoint, trainer = Checkpoint(tmp_path, every_n_steps=3), FakeTrainer()
    checkpoint.on_run_start(trainer)
    run_steps(checkpoint, trainer, 3)
    checkpoint.on_run_exception(trainer, ValueError())
    assert trainer.saved == ["step-000003"]


def test_save_on_exception_may_be_turned_off(tmp_path):
    checkpoint, trainer = Checkpoint(tmp_path, save_on_exception=False), FakeTrainer()
    checkpoint.on_run_start(trainer)
    run_steps(checkpoint, trainer, 1)
    checkpoint.on_run_exception(trainer, ValueError())
    assert trainer.saved == []


def test_failing_rescue_is_logged_and_does_not_hide_the_exception(tmp_path, monkeypatch, caplog):
    checkpoint, trainer = Checkpoint(tmp_path), FakeTrainer()
    checkpoint.on_run_start(trainer)
    run_steps(checkpoint, trainer, 1)
    (tmp_path / "step-000001").touch()  # save cannot make its folder
    checkpoint.on_run_exception(trainer, ValueError("the original"))
    assert "Checkpoint: saving after ValueError failed too." in caplog.text
    assert "FileExistsError" in caplog.text


# --- what it keeps ----------------------------------------------------------------------------------------------------


def test_keeps_the_latest_by_number(tmp_path):
    # with more digits the names no longer sort by step
    for name in ("step-000001", "step-999999", "step-1000000"):
        (tmp_path / name).mkdir()
    checkpoint, trainer = Checkpoint(tmp_path, every_n_steps=1, keep=2), FakeTrainer(step=1_000_000)
    checkpoint.on_run_start(trainer)
    run_steps(checkpoint, trainer, 1)
    assert names(tmp_path) == ["step-1000000", "step-1000001"]


def test_keep_none_keeps_all(tmp_path):
    checkpoint, trainer = Checkpoint(tmp_path, every_n_steps=1, keep=None), FakeTrainer()
    run_steps(checkpoint, trainer, 4)
    assert len(names(tmp_path)) == 4


def test_removes_nothing_of_another_name(tmp_path):
    others = ["best", "step-000001.incomplete", "step-1", "step-000001-copy", "xstep-000001"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000").touch()  # a file
    checkpoint, trainer = Checkpoint(tmp_path, every_n_steps=1, keep=1), FakeTrainer(step=1)
    run_steps(checkpoint, trainer, 2)
    assert names(tmp_path) == sorted([*others, "step-000000", "step-000003"])


def test_old_ones_go_only_after_the_new_one_is_there(tmp_path):
    checkpoint, trainer = Checkpoint(tmp_path, every_n_steps=1, keep=1), FakeTrainer()
    run_steps(checkpoint, trainer, 1)
    present = []
    save = trainer.save

    def look_then_save(path: Path) -> None:
        present.extend(names(tmp_path))
        save(path)

    trainer.save = look_then_save
    run_steps(checkpoint, trainer, 1)
    assert present == ["step-000001"]
    assert names(tmp_path) == ["step-000002"]


def test_only_rank_0_removes(tmp_path):
    checkpoint, trainer = Checkpoint(tmp_path, every_n_steps=1, keep=1), FakeTrainer(world_size=2, rank=1)
    run_steps(checkpoint, trainer, 2)
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_one_that_cannot_be_removed_is_logged(tmp_path, monkeypatch, caplog):
    def refuse(path: Path) -> None:
        raise PermissionError(f"not yours: {path.name}")

    monkeypatch.setattr("lightning_verl.callbacks.checkpoint.shutil.rmtree", refuse)
    checkpoint, trainer = Checkpoint(tmp_path, every_n_steps=1, keep=1), FakeTrainer()
    with caplog.at_level(logging.WARNING, logger="lightning_verl"):
        run_steps(checkpoint, trainer, 2)
    assert "could not remove the old" in caplog.text
    assert "not yours: step-000001.incomplete" in caplog.text
    assert Checkpoint.latest(tmp_path) == tmp_path / "step-000002"


# --- latest -----------------------------------------------------------------------------------------------------------


def test_latest_ignores_what_is_not_whole(tmp_path):
    for name in ("step-000002", "step-000010", "step-000011.incomplete", "step-000012.replaced"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000013").touch()
    assert Checkpoint.latest(tmp_path) == tmp_path / "step-000010"
    assert Checkpoint.latest(str(tmp_path)) == tmp_path / "step-000010"


def test_latest_of_nothing(tmp_path):
    assert Checkpoint.latest(tmp_path) is None
    assert Checkpoint.latest(tmp_path / "missing") is None


def test_folder_of_a_run_that_is_further_is_refused(tmp_path):
    (tmp_path / "step-000100").mkdir()
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(FileExistsError, match=r"a checkpoint of step 100, but this run starts at step 0\. Resume"):
        checkpoint.on_run_start(FakeTrainer())
    checkpoint.on_run_start(FakeTrainer(step=100))


def test_what_rank_0_sees_counts_for_all_ranks(tmp_path):
    with pytest.raises(FileExistsError, match="holds a checkpoint of step 7, but this run starts at step 3"):
        Checkpoint(tmp_path).on_run_start(FakeTrainer(step=3, world_size=2, rank=1, latest=7))


@pytest.mark.parametrize("options", [{"every_n_steps": 0}, {"keep": 0}])
def test_settings_out_of_range(tmp_path, options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"Checkpoint got {name}=0; it takes at least 1"):
        Checkpoint(tmp_path, **options)


# --- with a real trainer ----------------------------------------------------------------------------------------------


def make_trainer(folder: Path, fail_at_call: int | None = None, rank_that_fails: int = 0, **options: Any) -> RLTrainer:
    """GRPO with two prompts a step; the reward may fail at one of its calls, on one rank."""
    callbacks = [RewardEMA(decay=0.9), PrefetchLoader(depth=2), Checkpoint(folder, **options)]
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(), callbacks=callbacks)
    fabric.launch()
    calls = 0

    def score(response: str) -> float:
        nonlocal calls
        calls += 1
        if fail_at_call is not None and calls >= fail_at_call and fabric.global_rank == rank_that_fails:
            raise ZeroDivisionError("no score")
        return float(sum(character.isdigit() for character in response))

    actor = Actor(tiny_model("llama"), tokenizer=char_tokenizer(), learning_rate=1e-3)
    data = AsyncRolloutDataset([{"prompt": letter} for letter in "abcdefg"], tokenizer=actor.tokenizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RLTrainer: one rollout batch feeds")
        return RLTrainer(
            fabric,
            HybridDataFlow(actor, reward=RewardFunction(score, on_error="raise")),
            GRPO(),
            data,
            rollout_batch_size=2,
            samples_per_prompt=2,
            sampling=SamplingParams(max_new_tokens=3),
        )


def weights(trainer: RLTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.dataflow.modules["actor"].state_dict().items()}


def test_resumed_run_equals_the_uninterrupted_one(tmp_path):
    whole = make_trainer(tmp_path / "whole", every_n_steps=10)
    expected = whole.fit(5)
    make_trainer(tmp_path / "parts", every_n_steps=2).fit(3)  # saved at its end
    assert names(tmp_path / "parts") == ["step-000002", "step-000003"]
    resumed = make_trainer(tmp_path / "parts", every_n_steps=2)
    metrics = resumed.fit(5, resume_from=Checkpoint.latest(tmp_path / "parts"))
    assert names(tmp_path / "parts") == ["step-000004", "step-000005"]
    assert resumed.completed_steps == 5
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[name]), name
    assert {name: value for name, value in metrics.items() if not name.startswith("time/")} == {
        name: value for name, value in expected.items() if not name.startswith("time/")
    }


def test_failed_reward_saves_the_steps_before_it_and_raises_on(tmp_path):
    # two prompts with two samples: 4 calls a step, so call 10 is of the third
    broken = make_trainer(tmp_path, fail_at_call=10)
    with pytest.raises(AgreedError, match="no score"):
        broken.fit(5)
    assert names(tmp_path) == ["step-000002"]
    resumed = make_trainer(tmp_path)
    resumed.fit(3, resume_from=Checkpoint.latest(tmp_path))
    whole = make_trainer(tmp_path / "whole")
    whole.fit(3)
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[name]), name


def _fail_on_one_rank(folder: Path) -> str:
    trainer = make_trainer(folder, fail_at_call=5, rank_that_fails=1)  # 2 calls a step and rank: the third step
    try:
        trainer.fit(5)
    except AgreedError as error:
        return str(error)
    return "no error"


def test_failed_reward_on_one_rank_saves_on_all(tmp_path):
    messages = run_ranks(_fail_on_one_rank, 2, tmp_path)
    assert all("no score" in message for message in messages)
    assert names(tmp_path) == ["step-000002"]
    assert (tmp_path / "step-000002" / "state.pt").is_file()
