"""Losses and gradients do not depend on ranks, layouts, or how a mini-batch is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_verl import GRPO, PPO, SFT, Actor, Critic, HybridDataFlow, HybridStrategy, Reference
from lightning_verl.algorithms.base import Algorithm
from lightning_verl.data.experience import Experience, RolloutBatch
from lightning_verl.data.microbatches import Packing
from lightning_verl.data.sharding import split
from lightning_verl.parallel import compiling, offloading
from lightning_verl.pipeline.gather import whole_state
from lightning_verl.testing import run_ranks, tiny_model

GROUPS, SAMPLES, WIDTH, RESPONSE = 5, 2, 14, 6
FAMILIES = ("llama", "qwen2", "qwen3")
ALGORITHMS = ("ppo", "grpo", "sft")
ONE_ROW, TWO_CUTS, EVERYTHING = 1, 60, 10_000
"""Tokens a micro-batch: each row alone, about two micro-batches, all rows at once."""

Config = Mapping[str, Mapping[str, Any]]
Steps = dict[str, Tensor]


class SGDActor(Actor):
    """An actor whose step is its gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=1.0)


class SGDCritic(Critic):
    """A critic whose step is its gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def make_experience() -> Experience:
    """Ten rows in five groups of a prompt: unequal lengths, one empty response, one row that no reward scored."""
    generator = torch.Generator().manual_seed(3)
    rows = GROUPS * SAMPLES
    prompts = torch.randint(1, 6, (GROUPS,), generator=generator).repeat_interleave(SAMPLES)
    responses = torch.randint(1, RESPONSE + 1, (rows,), generator=generator)
    responses[3] = 0
    input_ids = torch.randint(3, 128, (rows, WIDTH), generator=generator)
    same = torch.arange(WIDTH) < prompts[:, None]
    input_ids = torch.where(same, input_ids[::SAMPLES].repeat_interleave(SAMPLES, 0), input_ids)
    rollout = RolloutBatch(
        input_ids=input_ids,
        prompt_lengths=prompts,
        response_lengths=responses,
        rollout_logprobs=torch.zeros(rows, RESPONSE),
        group_ids=torch.arange(GROUPS).repeat_interleave(SAMPLES),
        truncated=torch.zeros(rows, dtype=torch.bool),
        prompt_texts=[""] * rows,
        response_texts=[""] * rows,
        fields=[{} for _ in range(rows)],
    )
    scores = torch.randn(rows, generator=generator)
    valid = torch.ones(rows, dtype=torch.bool)
    valid[7] = False
    return Experience(rollout, scores.masked_fill(~valid, 0.0), valid)


def make_algorithm(name: str) -> Algorithm:
    if name == "ppo":
        return PPO(kl=0.05, kl_in="reward", entropy_coef=0.01)
    return GRPO(kl=0.05) if name == "grpo" else SFT()


def make_model(family: str, seed: int = 0, layers: int = 2) -> Any:
    """A model of a family, or of a family and a size of the vocabulary: ``"qwen2/131"``."""
    family, _, vocabulary = family.partition("/")
    return tiny_model(family, seed=seed, vocab_size=int(vocabulary or 128), num_hidden_layers=layers)  # type: ignore[arg-type]


def one_update(
    family: str,
    algorithm: Algorithm,
    budget: int,
    strategy: HybridStrategy,
    options: Mapping[str, Any],
    packing: Packing = "shared",
    layers: int = 2,
) -> tuple[Steps, dict[str, float]]:
    """Train once on the same rows under any layout; return every parameter's step, whole, and the metrics."""
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    torch.manual_seed(11)  # adapters are drawn from the global state
    actor = SGDActor(make_model(family, layers=layers), **options)
    critic = SGDCritic(make_model(family, seed=1, layers=layers))
    torch.nn.init.normal_(critic.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(5))
    reference = Reference(make_model(family, seed=2, layers=layers))
    flow = HybridDataFlow(
        actor, critic, None, reference, max_tokens_per_micro_batch=budget, packing=packing, max_grad_norm=1e9
    )
    flow.setup(fabric)
    flow.setup_optimizers()
    stages = {role: strategy.group(role, "pipeline") for role in ("actor", "critic")}
    before = {role: whole(flow.modules[role], stages[role]) for role in stages}
    rank, ranks = strategy.data_rank("actor"), strategy.layout("actor").data_size
    own = [g * SAMPLES + sample for g in split(GROUPS, ranks, rank) for sample in range(SAMPLES)]
    experience = make_experience().select(own)
    experience.old_logprobs = flow.logprobs(experience.rollout)
    experience.ref_logprobs = flow.reference_logprobs(experience.rollout)
    experience.values = flow.values(experience.rollout)
    algorithm.compute_advantages(experience, strategy.group("actor", "scores"))
    algorithm.update(flow, experience)
    steps = {
        f"{role}.{name}": before[role][name] - value
        for role in stages
        for name, value in whole(flow.modules[role], stages[role]).items()
    }
    return steps, flow.metrics.compute()


def whole(module: torch.nn.Module, stages: Any = None) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in whole_state(module, stages).items()}


def updates(
    config: Config,
    mesh: tuple[int, int, int, int] | None,
    cuts: Sequence[tuple[str, str, int]],
    actor_options: Mapping[str, Any] | None = None,
    packing: Packing = "shared",
    layers: int = 2,
    **options: Any,
) -> list[tuple[Steps, dict[str, float]]]:
    """``one_update`` for several families, algorithms and budgets, on the ranks that run this."""
    made = []
    for family, name, budget in cuts:
        strategy = HybridStrategy(mesh, config, **options)
        made.append(one_update(family, make_algorithm(name), budget, strategy, actor_options or {}, packing, layers))
    return made


def assert_equal_updates(
    actual: Sequence[tuple[Steps, dict[str, float]]], expected: Sequence[tuple[Steps, dict[str, float]]]
) -> None:
    for (steps, metrics), (wanted, wanted_metrics) in zip(actual, expected, strict=True):
        assert steps.keys() <= wanted.keys()
        moved = [name for name, step in wanted.items() if step.abs().max() > 1e-4]
        assert len(moved) >= 20, "the case must move weights to show anything"
        for name, step in steps.items():
            torch.testing.assert_close(
                step, wanted[name], atol=1e-5, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
        for name, value in wanted_metrics.items():
            assert metrics[name] == pytest.approx(value, abs=1e-4, rel=1e-4), name


EVERY_CASE = [(family, name, EVERYTHING) for family in FAMILIES for name in ALGORITHMS]
CUT_CASES = [("qwen3", name, budget) for name in ALGORITHMS for budget in (ONE_ROW, TWO_CUTS)]


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], tuple[Steps, dict[str, float]]]:
    """The updates of one process on padded rows, by family and algorithm."""
    made = updates({}, None, EVERY_CASE, packing="padded")
    return {(family, name): result for (family, name, _), result in zip(EVERY_CASE, made, strict=True)}


def expected_for(alone: Any, cases: Sequence[tuple[str, str, int]]) -> list[tuple[Steps, dict[str, float]]]:
    return [alone[family, name] for family, name, _ in cases]


@pytest.mark.parametrize("packing", get_args(Packing))
def test_micro_batches_change_nothing(alone: Any, packing: Packing) -> None:
    assert_equal_updates(updates({}, None, CUT_CASES, packing=packing), expected_for(alone, CUT_CASES))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("ranks", "mesh", "config"),
    [
        (2, None, {}),
        (2, None, {"actor": {"tp": 2}, "critic": {"tp": 2}, "reference": {"tp": 2}}),
        (4, None, {}),
        (4, (2, 2, 1, 1), {}),
    ],
    ids=["data2", "tensor2", "data4", "data2xtensor2"],
)
def test_layouts_change_nothing(alone: Any, family: str, ranks: int, mesh: Any, config: Config) -> None:
    cases = [case for case in EVERY_CASE if case[0] == family]
    for made in run_ranks(updates, ranks, config, mesh, cases):
        assert_equal_updates(made, expected_for(alone, cases))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("ranks", "mesh", "config", "options"),
    [
        (2, None, {}, {}),
        (2, None, {"actor": {"tp": 2}}, {"activation_checkpointing": "selective"}),
        (2, None, {"actor": {"dp": 1}, "critic": {"dp": 1}}, {"defer_gradient_sync": True}),
        (4, (2, 1, 1, 1), {}, {"defer_gradient_sync": True, "activation_checkpointing": "full"}),
        (4, (2, 2, 1, 1), {"critic": {"dp": 4}, "reference": {"dp": 1}}, {}),
    ],
    ids=["data2", "tensor2-selective", "replicas2-deferred", "hybrid2x2-full", "roles-differ"],
)
def test_cut_layouts_change_nothing(
    alone: Any, algorithm: str, ranks: int, mesh: Any, config: Config, options: Any
) -> None:
    cases = [case for case in CUT_CASES if case[1] == algorithm]
    for made in run_ranks(updates, ranks, config, mesh, cases, **options):
        assert_equal_updates(made, expected_for(alone, cases))


def compiled_updates(*args: Any, **options: Any) -> tuple[list[tuple[Steps, dict[str, float]]], int]:
    """``updates`` with compiled layers, and how many graphs torch made; as they are written, for the time's sake."""
    from torch._dynamo.utils import counters

    compiling.BACKEND = "eager"
    return updates(*args, compile_layers=True, **options), counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": "selective"}], ids=["kept", "selective"])
def test_compiled_layers_change_nothing(alone: Any, options: Any) -> None:
    """With FSDP2, whose hooks run around what is compiled."""
    cases = [("qwen3", "grpo", TWO_CUTS)]
    for made, graphs in run_ranks(compiled_updates, 2, {}, None, cases, **options):
        assert_equal_updates(made, expected_for(alone, cases))
        assert 3 <= graphs <= 6  # the actor with and without gradients, the reference


def offloaded_updates(*args: Any, **options: Any) -> list[tuple[Steps, dict[str, float]]]:
    """``updates`` with activations in host memory, small ones too."""
    offloading.LEAST_BYTES = 256
    return updates(*args, activation_offload=True, **options)


@pytest.mark.parametrize("mesh", [None, (1, 2, 1, 1)], ids=["data2", "tensor2"])
@pytest.mark.parametrize("mode", [None, "full"], ids=str)
def test_activations_in_host_memory_change_nothing(alone: Any, mesh: Any, mode: Any) -> None:
    cases = [("qwen3", "grpo", TWO_CUTS)]
    for made in run_ranks(offloaded_updates, 2, {}, mesh, cases, activation_checkpointing=mode):
        assert_equal_updates(made, expected_for(alone, cases))


@pytest.mark.parametrize(
    ("ranks", "mesh", "options"),
    [(2, (1, 2, 1, 1), {"enable_3d_hybrid": False}), (4, (2, 2, 1, 1), {"defer_gradient_sync": True})],
    ids=["tensor2", "data2xtensor2"],
)
def test_a_vocabulary_that_ranks_do_not_divide_changes_nothing(ranks: int, mesh: Any, options: Any) -> None:
    cases = [("qwen2/131", "ppo", TWO_CUTS), ("qwen3/131", "grpo", TWO_CUTS), ("gemma", "grpo", EVERYTHING)]
    expected = updates({}, None, cases)
    for made in run_ranks(updates, ranks, {}, mesh, cases, **options):
        assert_equal_updates(made, expected)


LORA = {
    "lora_config": {
        "r": 4,
        "alpha": 16,
        "dropout": 0.1,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
        "init_lora_weights": False,  # drawn at random: an adapter that starts at 0 would hide mistakes
    }
}


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [(2, (2, 1, 1, 1)), (2, (1, 2, 1, 1)), (4, (2, 2, 1, 1))],
    ids=["data2", "tensor2", "data2xtensor2"],
)
def test_adapters_train_alike_on_every_layout(ranks: int, mesh: Any) -> None:
    cases = [("qwen3", "grpo", TWO_CUTS), ("llama", "ppo", EVERYTHING)]
    expected = updates({}, None, cases, LORA)
    assert all(step.abs().max() == 0 for name, step in expected[0][0].items() if "actor" in name and "lora" not in name)
    for made in run_ranks(updates, ranks, {}, mesh, cases, LORA):
        assert_equal_updates(made, expected)


def test_an_adapter_on_the_head_trains_alike_on_a_tensor_axis() -> None:
    """It keeps the head whole in training."""
    targets = {**LORA["lora_config"], "target_modules": [*LORA["lora_config"]["target_modules"], "lm_head"]}
    cases = [("qwen3", "grpo", TWO_CUTS)]
    expected = updates({}, None, cases, {"lora_config": targets})
    for made in run_ranks(updates, 2, {}, (1, 2, 1, 1), cases, {"lora_config": targets}):
        assert_equal_updates(made, expected)


@pytest.fixture(scope="module")
def experts_alone() -> list[tuple[Steps, dict[str, float]]]:
    """The update of a model with experts on one process."""
    return updates({}, None, [("qwen3_moe", "ppo", EVERYTHING)])


@pytest.mark.parametrize(
    ("ranks", "mesh", "options"),
    [
        (2, (1, 1, 1, 2), {}),
        (2, (1, 2, 1, 1), {}),
        (4, (1, 1, 1, 4), {"activation_checkpointing": ["mlp.experts"]}),
        (4, (2, 1, 1, 2), {"activation_checkpointing": "full"}),
        (4, (1, 2, 1, 2), {}),
        (4, (1, 1, 1, 2), {"activation_checkpointing": "selective", "defer_gradient_sync": True}),
    ],
    ids=[
        "expert2",
        "tensor2",
        "expert4-listed",
        "data2xexpert2-full",
        "expert2xtensor2",
        "replicas2xexpert2-selective",
    ],
)
def test_experts_train_alike_on_every_layout(experts_alone: Any, ranks: int, mesh: Any, options: Any) -> None:
    for made in run_ranks(updates, ranks, {}, mesh, [("qwen3_moe", "ppo", TWO_CUTS)], **options):
        assert_equal_updates(made, experts_alone)


def test_the_expert_axis_is_a_data_axis_for_a_model_without_experts(alone: Any) -> None:
    cases = [("qwen3", "grpo", TWO_CUTS)]
    for made in run_ranks(updates, 2, {}, (1, 1, 1, 2), cases):
        assert_equal_updates(made, expected_for(alone, cases))


def test_adapters_train_alike_beside_divided_experts() -> None:
    targets = {**LORA["lora_config"], "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    cases = [("qwen3_moe", "ppo", TWO_CUTS)]
    expected = updates({}, None, cases, {"lora_config": targets})
    for made in run_ranks(updates, 2, {}, (1, 1, 1, 2), cases, {"lora_config": targets}):
        assert_equal_updates(made, expected)


@pytest.mark.parametrize(("family", "mesh"), [("qwen3", None), ("qwen3_moe", (1, 1, 1, 4))])
def test_ranks_without_rows_take_part(family: Any, mesh: Any) -> None:
    """One prompt on four ranks leaves three of them without a row."""
    for made in run_ranks(single_prompt_updates, 4, family, mesh):
        assert_equal_updates([made], [single_prompt_updates(family, None)])


def single_prompt_updates(family: Any, mesh: Any) -> tuple[Steps, dict[str, float]]:
    strategy = HybridStrategy(mesh)
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    flow = HybridDataFlow(SGDActor(tiny_model(family)), max_grad_norm=1e9)
    flow.setup(fabric)
    flow.setup_optimizers()
    before = whole(flow.modules["actor"])
    layout, rank = strategy.layout("actor"), strategy.data_rank("actor")
    own = [g * SAMPLES + sample for g in split(1, layout.data_size, rank) for sample in range(SAMPLES)]
    experience = make_experience().select(own)
    algorithm = GRPO()
    experience.old_logprobs = flow.logprobs(experience.rollout)
    algorithm.compute_advantages(experience, strategy.group("actor", "scores"))
    algorithm.update(flow, experience)
    steps = {f"actor.{name}": before[name] - value for name, value in whole(flow.modules["actor"]).items()}
    return steps, flow.metrics.compute()
