"""The loop, end to end on tiny models: cases that only show when all parts work together."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_verl import (
    GRPO,
    PPO,
    SFT,
    Actor,
    AdaptiveKL,
    AsyncRolloutDataset,
    Critic,
    HybridDataFlow,
    HybridStrategy,
    Reference,
    RewardFunction,
    RLTrainer,
    SamplingParams,
)
from lightning_verl.algorithms.base import Algorithm
from lightning_verl.callbacks import RewardEMA
from lightning_verl.data.experience import Experience, PromptBatch
from lightning_verl.rollout.base import FinishReason, Rollouts
from lightning_verl.rollout.batch import join_rollouts
from lightning_verl.strategies.diagnosis import StepTimes
from lightning_verl.strategies.dispatch import AgreedError
from lightning_verl.strategies.layout import RoleLayout
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model
from lightning_verl.trainer import _put_gradient_groups

TOKENIZER = char_tokenizer()
ROWS = [{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in range(10)]
SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.7)


def count_digits(response: str) -> float:
    """Something that differs between samples."""
    return float(sum(character in "0123456789" for character in response))


class SGDActor(Actor):
    """Adam would turn the rounding of tiny gradients into steps of its own size."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(
    algorithm: Algorithm,
    *,
    reward: Callable[..., Any] = count_digits,
    fabric: Fabric | None = None,
    callbacks: list[Any] | None = None,
    family: Any = "qwen3",
    model: nn.Module | None = None,
    actor_class: type[Actor] = Actor,
    actor_options: Mapping[str, Any] | None = None,
    flow_options: Mapping[str, Any] | None = None,
    data_options: Mapping[str, Any] | None = None,
    rows: Any = ROWS,
    **options: Any,
) -> RLTrainer:
    torch.manual_seed(0)  # adapters are drawn from the global state
    if fabric is None:
        fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(), callbacks=callbacks or [])
        fabric.launch()
    make = lambda seed: tiny_model(family, seed=seed, vocab_size=len(TOKENIZER))  # noqa: E731
    actor = actor_class(model or make(0), tokenizer=TOKENIZER, **{"learning_rate": 1e-3, **(actor_options or {})})
    roles = {"critic": Critic(make(1), learning_rate=1e-3)} if algorithm.needs_critic else {}
    if algorithm.needs_reference and not actor.has_adapter:
        roles["reference"] = Reference(make(2))
    flow = HybridDataFlow(actor, reward=RewardFunction(reward), **roles, **(flow_options or {}))
    data = AsyncRolloutDataset(rows, tokenizer=TOKENIZER, seed=0, **(data_options or {}))
    sizes = {"rollout_batch_size": 2, "samples_per_prompt": 4, "sampling": SAMPLING, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RLTrainer: one rollout batch feeds")
        return RLTrainer(fabric, flow, algorithm, data, **sizes)


def weights(trainer: RLTrainer) -> dict[str, Tensor]:
    modules = trainer.dataflow.modules
    return {f"{role}.{name}": value.clone() for role in modules for name, value in modules[role].state_dict().items()}


# ---- ratio, temperature, dropout -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["as sampled", "shuffled", "one by one"])
def test_the_ratio_is_one_at_unchanged_weights_in_spite_of_dropout(order: str) -> None:
    """GPT-2 and an adapter, both with dropout 0.1, prompts of unequal lengths, learning rate 0, two epochs."""
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    model = tiny_model("gpt2", vocab_size=len(TOKENIZER), **dropout).train()
    lora = {"r": 2, "alpha": 4, "dropout": 0.1, "target_modules": ["c_attn"], "init_lora_weights": False}
    rows = [{"prompt": "1" * length} for length in (1, 3, 6, 9)]
    trainer = make_trainer(
        GRPO(),
        model=model,
        rows=rows,
        actor_options={"lora_config": lora, "learning_rate": 0.0},
        flow_options={"max_tokens_per_micro_batch": 1 if order == "one by one" else 1000},
        data_options={"shuffle": order == "shuffled"},
        rollout_batch_size=4,
        update_batch_size=2,
        epochs=2,
        old_logprobs="rollout",
    )
    actor = trainer.dataflow.modules["actor"]
    actor.train()
    modes = [module.training for module in actor.modules()]
    metrics = trainer.fit(1)
    assert metrics["actor/rollout_gap_max"] < 1e-5
    assert metrics["actor/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["actor/clip_fraction"] == 0.0
    assert metrics["actor/approx_kl"] == pytest.approx(0.0, abs=1e-9)
    assert [module.training for module in actor.modules()] == modes


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_log_probs_do_not_depend_on_padding_or_batch_mates(family: Any) -> None:
    trainer = make_trainer(GRPO(), family=family)
    flow = trainer.dataflow
    prompts = next(iter(trainer.data.loader(6)))
    batch = flow.rollout(prompts, SamplingParams(n=1, max_new_tokens=4), step=0)
    together = flow.logprobs(batch)
    torch.testing.assert_close(together, batch.rollout_logprobs, atol=1e-5, rtol=0)
    wider = batch.select(list(range(6)))
    wider.input_ids = torch.nn.functional.pad(wider.input_ids, (0, 5), value=7)
    torch.testing.assert_close(flow.logprobs(wider), together, atol=1e-5, rtol=0)
    for row in range(6):
        own = batch.select([row])
        alone = flow.logprobs(own.narrowed(int(own.lengths), int(own.response_lengths)))
        torch.testing.assert_close(alone[0], together[row, : alone.shape[1]], atol=1e-5, rtol=0)


# ---- old log-probs -------------------------------------------------------------------------------------------------


def passes(trainer: RLTrainer) -> list[int]:
    """Count the passes that recompute the actor's log-probs."""
    calls = [0]
    logprobs = trainer.dataflow.logprobs

    def counted(batch: Any) -> Tensor:
        calls[0] += 1
        return logprobs(batch)

    trainer.dataflow.logprobs = counted  # type: ignore[method-assign]
    return calls


def test_auto_runs_no_pass_where_one_update_follows_one_rollout() -> None:
    trainer = make_trainer(GRPO())
    calls = passes(trainer)
    trainer.fit(2)
    assert calls == [0]


def test_auto_recomputes_until_the_engines_own_are_measured_to_agree() -> None:
    trainer = make_trainer(GRPO(), update_batch_size=1)
    calls = passes(trainer)
    trainer.fit(3)  # step 0 has no measurement yet; then the transformers engine in fp32 is within 1e-5
    assert calls == [1]


def test_auto_goes_on_recomputing_where_sampling_used_another_support() -> None:
    sampling = SamplingParams(
        max_new_tokens=4, top_k=2
    )  # the engine's log-probs are over two tokens, training's over all
    trainer = make_trainer(GRPO(), update_batch_size=1, sampling=sampling)
    calls = passes(trainer)
    trainer.fit(3)
    assert calls == [3]


def test_every_source_of_old_log_probs_trains_alike() -> None:
    trained = []
    for source in ("auto", "recompute", "rollout"):
        trainer = make_trainer(GRPO(), update_batch_size=1, old_logprobs=source, actor_class=SGDActor)
        trainer.fit(2)
        trained.append(weights(trainer))
    for other in trained[1:]:
        for name, value in trained[0].items():
            torch.testing.assert_close(value, other[name], atol=1e-5, rtol=1e-5)


# ---- resume --------------------------------------------------------------------------------------------------------


class Seen:
    """Notes the prompts of each step."""

    def __init__(self) -> None:
        self.prompts: list[list[str]] = []

    def on_rollout_end(self, trainer: RLTrainer, batch: Any) -> None:
        self.prompts.append(batch.prompt_texts)


def resumable(**options: Any) -> tuple[RLTrainer, Seen, RewardEMA]:
    seen, average = Seen(), RewardEMA(decay=0.9)
    trainer = make_trainer(
        PPO(kl=AdaptiveKL(0.2, target=0.5, horizon=100)),
        callbacks=[seen, average],
        samples_per_prompt=2,
        update_batch_size=1,
        warmup_steps=5,
        **options,
    )
    return trainer, seen, average


@pytest.mark.parametrize("prefetch", [1, 4])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, prefetch: int) -> None:
    """10 prompts, batch 2, stop at step 7 in the middle of epoch 2, 9 steps in all: bit for bit."""
    data = {"prefetch_factor": prefetch}
    whole, whole_seen, whole_average = resumable(data_options=data)
    expected = whole.fit(9)

    first, _, _ = resumable(data_options=data)
    first.fit(7)
    first.save(tmp_path / "checkpoint")
    torch.manual_seed(99)  # whatever happens in between
    second, seen, average = resumable(data_options=data)
    metrics = second.fit(9, resume_from=tmp_path / "checkpoint")

    assert seen.prompts == whole_seen.prompts[7:]
    assert second.completed_steps == 9
    assert second.algorithm.kl.value == whole.algorithm.kl.value != 0.2
    assert average.state_dict() == whole_average.state_dict()
    for name, value in weights(whole).items():
        assert torch.equal(weights(second)[name], value), name
    for name in ("actor/loss", "critic/loss", "actor/grad_norm", "reward/mean", "rollout/kl"):
        assert metrics[name] == expected[name]


def test_what_lives_as_long_as_a_run_is_out_of_the_garbage_collectors_sight() -> None:
    frozen = []

    class Watch:
        def on_step_start(self, step: int) -> None:
            frozen.append(gc.get_freeze_count() > 0)
            if step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_trainer(GRPO(), callbacks=[Watch()]).fit(4)
    assert frozen == [False, False, True, True]
    assert gc.get_freeze_count() == 0


def test_the_step_counts_on_from_an_earlier_trainer() -> None:
    steps: list[int] = []

    class Steps:
        def on_step_end(self, step: int) -> None:
            steps.append(step)

    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(), callbacks=[Steps()])
    fabric.launch()
    trainer = make_trainer(SFT(response_field="answer"), fabric=fabric, samples_per_prompt=None)
    before = weights(trainer)
    metrics = trainer.fit(2)
    assert metrics["actor/loss"] > 0
    assert not torch.equal(before["actor.model.lm_head.weight"], weights(trainer)["actor.model.lm_head.weight"])
    rl = RLTrainer(
        fabric,
        trainer.dataflow,
        GRPO(),
        trainer.data,
        rollout_batch_size=2,
        update_batch_size=2,
        samples_per_prompt=2,
        sampling=SAMPLING,
        first_step=trainer.global_step,
    )
    rl.fit(2)
    assert steps == [0, 1, 2, 3]


# ---- rewards that fail ---------------------------------------------------------------------------------------------


def test_a_step_without_a_single_score_is_skipped_and_counted() -> None:
    trainer = make_trainer(GRPO(), reward=lambda response: None)
    before = weights(trainer)
    with pytest.warns(UserWarning, match="update of the actor was skipped, no row of the mini-batch has a token"):
        metrics = trainer.fit(1)
    assert metrics["actor/skipped_updates"] == 1
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted() -> None:
    class Broken(GRPO):
        def actor_loss(self, *arguments: Any) -> Any:
            loss, metrics = super().actor_loss(*arguments)
            return loss * float("nan"), metrics

    trainer = make_trainer(Broken())
    before = weights(trainer)
    with pytest.warns(UserWarning, match="update of the actor was skipped, the gradient norm is nan"):
        metrics = trainer.fit(1)
    assert metrics["actor/skipped_updates"] == 1
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_a_reward_that_is_not_a_number_stops_before_any_weight_changes() -> None:
    trainer = make_trainer(GRPO(), reward=lambda response: float("nan"))
    before = weights(trainer)
    with pytest.raises(AgreedError, match="the reward phase failed on rank 0: RewardError.*nan"):
        trainer.fit(1)
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def fail_on_second_rank() -> str:
    strategy = HybridStrategy()
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()

    def reward(response: str) -> float:
        if strategy.global_rank == 1:
            raise OSError("no space left")
        return 1.0

    trainer = make_trainer(GRPO(), reward=reward, fabric=fabric)
    with pytest.raises(AgreedError) as caught:
        trainer.fit(1)
    return str(caught.value)


def test_a_reward_that_fails_on_one_rank_fails_on_all() -> None:
    for message in run_ranks(fail_on_second_rank, 2):
        assert message.startswith("the reward phase failed on rank 1: RewardError")
        assert "no space left" in message


def slow_on_second_rank() -> float:
    strategy = HybridStrategy(timeout=timedelta(seconds=3))
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()

    def reward(response: str) -> float:
        if strategy.global_rank == 1:
            time.sleep(1.5)  # four rows: 6 seconds
        return float(len(response))

    trainer = make_trainer(GRPO(), reward=reward, fabric=fabric)
    return trainer.fit(1)["actor/grad_norm"]


def test_a_slow_reward_does_not_run_into_the_time_out_of_collectives() -> None:
    first, second = run_ranks(slow_on_second_rank, 2)
    assert first == second


# ---- texts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "<think>a</think>b")])
def test_special_tokens_are_kept_or_left_out_of_the_text_and_padding_never_is_in_it(skip: bool, expected: str) -> None:
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<think>", "a", "</think>", "b")]
    ids += [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.pad_token_id]
    prompts = PromptBatch(torch.tensor([[5, 6]]), torch.tensor([2]), torch.tensor([0]), ["x"], [{}])
    rollouts = Rollouts(
        torch.tensor([ids]), torch.tensor([5]), torch.zeros(1, 7), [FinishReason.EOS], torch.tensor([0]), 0
    )
    batch = join_rollouts(prompts, rollouts, tokenizer, SAMPLING, skip)
    assert batch.response_texts == [expected]
    assert batch.input_ids.tolist() == [[5, 6, *ids[:5]]]
    assert batch.response_mask.tolist() == [[True] * 5 + [False] * 2]


# ---- what bad input gets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_batch_size": 4}, r"update_batch_size=4 > rollout_batch_size=2"),
        ({"samples_per_prompt": 0}, r"samples_per_prompt=0; it takes a whole number of at least 1"),
        ({"epochs": 0}, r"epochs=0; it takes a whole number of at least 1"),
        ({"data_options": {"max_prompt_length": 126}}, r"126 \+ 4 = 130 tokens exceed .*max_position_embeddings=128"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(GRPO(), **options)


def test_sft_takes_one_response_a_prompt_from_the_named_field() -> None:
    with pytest.raises(ValueError, match="samples_per_prompt=4, but SFT samples nothing"):
        make_trainer(SFT())
    trainer = make_trainer(SFT(response_field="reply"), samples_per_prompt=None)
    with pytest.raises(AgreedError, match=r"the rollout phase failed on rank 0: .*field 'reply'.*fields: \['answer'\]"):
        trainer.fit(1)


def test_a_role_that_the_algorithm_needs_is_named() -> None:
    trainer = make_trainer(GRPO())
    with pytest.raises(ValueError, match=r"PPO needs a critic, but the HybridDataFlow has only \['actor', 'reward'\]"):
        RLTrainer(trainer.fabric, trainer.dataflow, PPO(), trainer.data, rollout_batch_size=2)
    with pytest.raises(ValueError, match="GRPO needs a reference"):
        RLTrainer(trainer.fabric, trainer.dataflow, GRPO(kl=0.1), trainer.data, rollout_batch_size=2)


def test_idle_ranks_get_the_ratio_to_use_once() -> None:
    trainer = make_trainer(PPO(), rollout_batch_size=4, update_batch_size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            # h = 0.25: k = 0.25 x 0.9 / (0.1 x 0.75) = 3; 3 x 4 / 1 = 12
            trainer._warn_once_of_idling(StepTimes(10.0, 0.0, 2.5))
    assert [str(one.message).split("use ")[1].split(":")[0] for one in caught] == ["12"]


def test_an_unusual_ratio_gets_advice_and_the_idle_share_is_reported() -> None:
    trainer = make_trainer(GRPO())
    with pytest.warns(UserWarning, match=r"feeds 2 update batches \(4 / 2\). 4, or the actor's data ranks \(1\)"):
        RLTrainer(trainer.fabric, trainer.dataflow, GRPO(), trainer.data, rollout_batch_size=4, update_batch_size=2)
    assert 0 <= trainer.fit(1)["time/idle_share"] < 1


def test_a_tokenizer_without_pad_or_end_token_is_refused() -> None:
    for token in ("pad_token", "eos_token"):
        tokenizer = char_tokenizer()
        setattr(tokenizer, token, None)
        with pytest.raises(ValueError, match=f"has no {token[:3]} token"):
            Actor(tiny_model(), tokenizer=tokenizer).require_tokenizer()


def test_the_reference_of_an_adapter_is_the_policy_at_step_0() -> None:
    """Also after SFT has trained the adapter: the RL run's reference is what SFT made, not the base model."""
    lora = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    options = {"lora_config": lora, "learning_rate": 1e-2}
    sft = make_trainer(SFT(response_field="answer"), actor_options=options, samples_per_prompt=None)
    flow = sft.dataflow
    sft.fit(3)
    batch = flow.rollout(next(iter(sft.data.loader(4))), SAMPLING, step=0)
    at_start = flow.logprobs(batch)
    rl = RLTrainer(
        sft.fabric,
        flow,
        GRPO(kl=0.1),
        sft.data,
        rollout_batch_size=2,
        update_batch_size=2,
        samples_per_prompt=4,
        sampling=SAMPLING,
        learning_rates={"actor": 1e-2},
    )
    rl.fit(2)
    assert (flow.logprobs(batch) - at_start).abs().max() > 1e-3, "the case must move the policy"
    torch.testing.assert_close(flow.reference_logprobs(batch), at_start, atol=1e-6, rtol=0)
    assert isinstance(flow.score(batch), Experience)


@pytest.mark.parametrize(
    ("layout", "operation"),
    [
        (RoleLayout("critic", 1, 2, 1, (0, 1)), "reduce"),
        (RoleLayout("critic", 2, 1, 1, (0, 1)), "replicate"),
        (RoleLayout("critic", 1, 1, 1, (0, 1), expert=2), "reduce"),  # FSDP2 cuts over expert ranks too
    ],
)
def test_a_users_gradient_group_goes_where_gradients_are_summed(layout: RoleLayout, operation: str) -> None:
    placed: list[Any] = []
    strategy = SimpleNamespace(layout=lambda role: layout, set_group=lambda *given: placed.append(given))
    _put_gradient_groups(SimpleNamespace(strategy=strategy), {"critic": "group"})  # type: ignore[arg-type, dict-item]
    assert placed == [("critic", operation, "group")]
