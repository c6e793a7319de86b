"""Model roles: where they come from, what they compute, what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_verl import Actor, Critic, HybridDataFlow, HybridStrategy, Reference, Reward, RewardEnsemble
from lightning_verl.data.experience import RolloutBatch
from lightning_verl.data.sharding import split
from lightning_verl.strategies.dispatch import AgreedError
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_config, tiny_model


def some_rows(count: int = 5) -> RolloutBatch:
    generator = torch.Generator().manual_seed(1)
    return RolloutBatch(
        input_ids=torch.randint(3, 80, (count, 8), generator=generator),
        prompt_lengths=torch.full((count,), 3),
        response_lengths=torch.randint(1, 6, (count,), generator=generator),
        rollout_logprobs=torch.zeros(count, 5),
        group_ids=torch.arange(count),
        truncated=torch.zeros(count, dtype=torch.bool),
        prompt_texts=["p"] * count,
        response_texts=["response"] * count,
        fields=[{}] * count,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    char_tokenizer().save_pretrained(str(tmp_path / "model"))
    return tmp_path / "model"


def test_an_actor_comes_from_a_folder_a_config_or_a_module(folder: Path) -> None:
    expected, _ = Actor(tiny_model())(some_rows())
    for source in (folder, str(folder)):
        actor = Actor(source)
        assert actor.require_tokenizer().eos_token_id == 2
        torch.testing.assert_close(actor(some_rows())[0], expected)
    random = Actor(tiny_config())
    assert next(random.parameters()).dtype is torch.float32
    with pytest.raises(ValueError, match="Actor was built from a config or a module and has no tokenizer"):
        random.require_tokenizer()


def test_caps_of_attention_scores_are_not_left_out(tmp_path: Path) -> None:
    """With SDPA, their default, models of Gemma 2 forget the cap; the one of the tests is small enough to tell."""
    config = tiny_config("gemma2", attn_implementation="sdpa")
    expected, _ = Actor(tiny_model("gemma2"))(some_rows())
    tiny_model("gemma2", attn_implementation="sdpa").save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(str(tmp_path))
    torch.testing.assert_close(Actor(tmp_path)(some_rows())[0], expected)
    assert Actor(config, tokenizer=char_tokenizer()).model.config._attn_implementation == "eager"
    chosen = tiny_config("gemma2", attn_implementation="flex_attention")
    assert Actor(chosen, tokenizer=char_tokenizer()).model.config._attn_implementation == "flex_attention"


def test_log_probs_are_those_of_the_plain_model() -> None:
    """By hand from the logits of one row: the token at place t is predicted at t - 1, logits divided by 0.7."""
    batch = some_rows(1)
    logprobs, entropy = Actor(tiny_model())(batch, 0.7, True)
    logits = tiny_model()(input_ids=batch.input_ids).logits[0] / 0.7
    length = int(batch.response_lengths)
    table = logits.log_softmax(-1)[2 : 2 + length]
    expected = table.gather(1, batch.input_ids[0, 3 : 3 + length, None])[:, 0]
    torch.testing.assert_close(logprobs[0, :length], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy[0, :length], -(table.exp() * table).sum(-1), atol=1e-5, rtol=1e-5)
    assert torch.all(logprobs[0, length:] == 0)


def test_a_critic_starts_at_zero_and_reads_the_state_before_each_token(folder: Path) -> None:
    batch = some_rows(1)
    for critic in (Critic(folder), Critic(tiny_config()), Critic(tiny_model())):
        assert torch.all(critic(batch) == 0)
        assert not any("lm_head" in name for name, _ in critic.named_parameters())
    critic = Critic(folder)
    torch.nn.init.ones_(critic.value_head.weight)
    hidden = tiny_model().model(input_ids=batch.input_ids).last_hidden_state[0]
    torch.testing.assert_close(critic(batch)[0, 0], hidden[2].sum(), atol=1e-4, rtol=1e-4)


def test_a_reference_is_frozen() -> None:
    reference = Reference(tiny_model())
    assert reference.role == "reference"
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_a_reward_model_reads_the_last_token() -> None:
    batch = some_rows()
    reward = Reward(tiny_config())
    scores = reward.score(batch)
    row = int(batch.lengths[2])
    hidden = reward.model.model(input_ids=batch.input_ids[2:3, :row]).last_hidden_state[0, -1]
    torch.testing.assert_close(scores.values[2], reward.model.score(hidden)[0], atol=1e-5, rtol=1e-5)
    assert scores.valid.all()
    assert len(reward.score(batch.select([])).values) == 0


def test_adapters_are_refused_where_they_make_no_sense() -> None:
    lora = {"r": 2, "alpha": 4, "target_modules": ["q_proj"]}
    with pytest.raises(ValueError, match="Reward: got lora_config=.*a reward is frozen"):
        Reward(tiny_config(), lora_config=lora)
    tied = {"r": 2, "target_modules": ["lm_head"]}
    with pytest.raises(ValueError, match="'lm_head', but Qwen2ForCausalLM ties its head to the embedding"):
        Actor(tiny_model("qwen2"), lora_config=tied)
    with pytest.raises(ValueError, match=r"Actor got lora_config=\{'rank': 2\}: .*rank"):
        Actor(tiny_model(), lora_config={"rank": 2})
    with pytest.raises(TypeError, match="needs a transformers model, got Linear"):
        Actor(torch.nn.Linear(1, 1), lora_config=lora)


def test_an_adapter_trains_alone() -> None:
    critic = Critic(tiny_model(), lora_config={"r": 2, "alpha": 4, "target_modules": ["q_proj"]})
    trained = {name for name, parameter in critic.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in critic.named_parameters() if "lora" in name} | {"value_head.weight"}


def mixed_adapter() -> tuple[set[torch.dtype], set[torch.dtype], float]:
    """fp32 adapters on a bf16 base, sharded: their dtypes differ inside one unit of FSDP2."""
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(), precision="bf16-mixed")
    fabric.launch()
    torch.manual_seed(0)
    lora = {"r": 2, "alpha": 4, "target_modules": ["q_proj"], "init_lora_weights": False}
    actor = Actor(tiny_model(), lora_config=lora)
    module = fabric.setup_module(actor)
    logprobs, _ = module(some_rows())
    fabric.backward(logprobs.sum())
    trained = [parameter for parameter in actor.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in actor.parameters() if not parameter.requires_grad]
    largest = max(float(p.grad.full_tensor().abs().max()) for p in trained)  # type: ignore[union-attr]
    return {p.dtype for p in trained}, {p.dtype for p in frozen}, largest


def test_fp32_adapters_train_on_a_bf16_base() -> None:
    for trained, frozen, largest in run_ranks(mixed_adapter, 2):
        assert (trained, frozen) == ({torch.float32}, {torch.bfloat16})
        assert largest > 0


def ensemble_scores(config: dict[str, Any], count: int) -> tuple[Tensor, dict[str, float]]:
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(parallelism_config=config))
    fabric.launch()
    torch.manual_seed(0)
    members = [Reward(tiny_config()), Reward(tiny_config(num_hidden_layers=1)), lambda response: len(response) / 10]
    flow = HybridDataFlow(Actor(tiny_model()), reward=RewardEnsemble(members), max_tokens_per_micro_batch=20)
    flow.setup(fabric)
    layout = fabric.strategy.layout("actor")
    own = split(count, layout.data_size, fabric.strategy.data_rank("actor"))
    experience = flow.score(some_rows(count).select(list(own)))
    assert not any(parameter.requires_grad for parameter in flow.modules["reward"].parameters())
    return experience.scores, flow.metrics.compute()


@pytest.mark.parametrize(
    "config", [{}, {"actor": {"tp": 2}}, {"reward": {"tp": 2}}], ids=["data2", "tensor2", "reward"]
)
def test_an_ensemble_of_models_and_functions_scores_alike_on_every_layout(config: dict[str, Any]) -> None:
    expected, metrics = ensemble_scores({}, 5)
    assert metrics["reward/disagreement"] > 0
    ranks = run_ranks(ensemble_scores, 2, config, 5)
    split_rows = config.get("actor", {}).get("tp", 1) == 1
    actual = torch.cat([scores for scores, _ in ranks]) if split_rows else ranks[0][0]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for _, figures in ranks:
        assert figures["reward/mean"] == pytest.approx(metrics["reward/mean"], abs=1e-5)
        assert figures["reward/disagreement"] == pytest.approx(metrics["reward/disagreement"], abs=1e-5)


def failing_ensemble() -> tuple[str, float]:
    """Models between functions, sharded; a function fails on rank 1 alone. Another data flow then starts afresh."""
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy())
    fabric.launch()

    def fails(response: str) -> float:
        if fabric.global_rank == 1:
            raise OSError("no space left")
        return 1.0

    def score_with(function: Any) -> Tensor:
        flow = HybridDataFlow(Actor(tiny_model()), reward=RewardEnsemble([function, *map(Reward, [tiny_config()] * 2)]))
        flow.setup(fabric)
        return flow.score(some_rows()).scores

    with pytest.raises(AgreedError) as caught:
        score_with(fails)
    return str(caught.value), float(score_with(lambda response: 1.0).sum())


def test_a_function_that_fails_beside_sharded_models_fails_on_all_ranks() -> None:
    first, second = run_ranks(failing_ensemble, 2)
    assert first == second
    assert "the reward phase failed on rank 1: RewardError" in first[0]


def test_a_role_in_the_wrong_place_is_named() -> None:
    with pytest.raises(TypeError, match=r"HybridDataFlow\(critic=...\) got Reference with role 'reference'"):
        HybridDataFlow(Actor(tiny_model()), critic=Reference(tiny_model()))
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch=0; it must be above 0"):
        HybridDataFlow(Actor(tiny_model()), max_tokens_per_micro_batch=0)
