"""Whole plans: the design's four processes, 1,024 ranks of an 8B model, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_verl import Critic, Reference
from lightning_verl.cli import main
from lightning_verl.config import (
    BatchConfig,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    StrategyConfig,
    TrainConfig,
    read_config,
)
from lightning_verl.planning import memory
from lightning_verl.planning.memory import SAMPLE_BYTES, kept_per_token
from lightning_verl.planning.model import build_on_meta
from lightning_verl.planning.plan import Hardware, Plan, default_ranks, make_plan
from lightning_verl.planning.report import draw, report
from lightning_verl.planning.traffic import Traffic
from lightning_verl.resharding.planner import TensorLayout
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.strategies.layout import RoleLayout
from lightning_verl.strategies.precision import HybridPrecision
from lightning_verl.testing import tiny_config

ROOT = Path(__file__).parents[2]
FOUR: dict[str, Any] = {
    "mesh_shape": (2, 2, 1, 1),
    "parallelism_config": {"actor": {"tp": 2, "dp": 2}, "critic": {"tp": 1, "dp": 4}, "reward": {"dp": 1}},
    "hybrid_engine_config": {"rollout_tp": 2},
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with nothing but the config of a tiny Qwen3."""
    tiny_config("qwen3").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def config(model: str, **changes: Any) -> TrainConfig:
    whole = TrainConfig(
        model=ModelConfig(model),
        data=DataConfig("prompts.jsonl", max_prompt_length=8),
        algorithm={"name": "ppo", "kl": 0.01},
        steps=1,
        output="out",
        rewards=RewardConfig(["rewards:score"]),
        sampling=SamplingParams(max_new_tokens=8),
        batch=BatchConfig(rollout_batch_size=16, update_batch_size=4, max_tokens_per_micro_batch=64),
        strategy=StrategyConfig(**FOUR),
    )
    return replace(whole, **changes)


@pytest.fixture(scope="module")
def large() -> Plan:
    """1,024 ranks of examples/plan: 16 meshes of 32 x 2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return make_plan(read_config(["examples/plan/plan.yaml"]), 1024)


# ---- four processes --------------------------------------------------------------------------------------------------


def test_the_four_processes_of_the_design(model: str) -> None:
    text = report(make_plan(config(model)))
    assert text.startswith("Plan: PPO on 4 ranks, 32-true, 80 GiB a GPU\n")
    # 2 layers of 37,024, embedding and head of 8,192, a norm of 64; the critic has a value head of 64 for the head.
    assert "  actor      Qwen3ForCausalLM, 90,496 parameters, 90,496 trained\n" in text
    assert "  critic     Qwen3Model, 82,368 parameters, 82,368 trained\n" in text
    assert "  reference  Qwen3ForCausalLM, 90,496 parameters, frozen\n" in text
    drawn = text[text.index("  actor      1 x") : text.index("\n\nBatches")]
    assert drawn.splitlines() == [
        "  actor      1 x 2 x 1 x 2: 2 data ranks, ranks 0-3",
        "             [0 1] [2 3]",
        "  critic     1 x 4 x 1 x 1: 4 data ranks, ranks 0-3",
        "             [0] [1] [2] [3]",
        "  reference  1 x 2 x 1 x 2: 2 data ranks, ranks 0-3",
        "             [0 1] [2 3]",
        "  rollout    2 x 1 x 1 x 2: 2 data ranks, ranks 0-3",
        "             [0 1] [2 3]",
        "  reward     functions, on the first rank of each tensor axis of the actor",
    ]
    assert "Batches: 16 prompts x 1 samples a step, mini-batches of 4 prompts (ratio 4), 1 epoch(s)\n" in text
    assert (
        "  actor      8 rows a data rank; 4 mini-batches of 2 rows, each in up to 1 micro-batches of 32 tokens" in text
    )
    assert (
        "  critic     4 rows a data rank; 4 mini-batches of 1 rows, each in up to 1 micro-batches of 16 tokens" in text
    )


def test_memory_of_the_four_processes_by_hand(model: str) -> None:
    plan = make_plan(config(model))
    (kind,) = plan.memory
    assert (kind.ranks, kind.roles) == ((0, 1, 2, 3), ("actor", "critic", "reference"))
    assert [phase.name for phase in kind.phases] == ["rollout", "scoring", "critic_update", "actor_update"]
    always = {(i.role, i.what): i.bytes for i in kind.phases[0].peak.items}
    # Matrices of 73,728, embedding and head of 16,384 over 2 x 2, norms of 384 + 64 over 2 shards, fp32.
    held = 4 * ((73_728 + 16_384) // 4 + 448 // 2 - 32)
    assert 73_728 + 384 - 64 + 64 + 16_384 == 90_496
    assert always["actor", "parameters"] == always["reference", "parameters"] == held
    assert always["actor", "optimizer state"] == 2 * held
    # The critic's 82,368 over 4 shards, but for the value head of one row, which is whole on the first rank.
    assert always["critic", "parameters"] == 4 * ((82_368 - 64) // 4 + 64)
    assert ("reference", "optimizer state") not in always


def test_ranks_of_their_own_are_planned_for_themselves(model: str) -> None:
    strategy = StrategyConfig((2, 1, 1, 1), {"critic": {"dp": 2, "ranks": [2, 3]}})
    plan = make_plan(config(model, strategy=strategy))
    assert plan.world_size == 4
    assert {kind.ranks: kind.roles for kind in plan.memory} == {(0, 1): ("actor", "reference"), (2, 3): ("critic",)}


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "sampled"),
        ({"min_p": 0.1, "stop_token_ids": (3,)}, "sampled"),
        ({"top_p": 0.9}, "top_p"),
        ({"temperature": 0.0, "top_p": 0.9}, "greedy"),
        ({"logit_bias": {3: 1.0}}, "sampled, adjusted"),
        ({"min_new_tokens": 1, "top_p": 0.9}, "top_p, adjusted"),
        ({"repetition_penalty": 1.1, "temperature": 0.0}, "greedy, adjusted"),
    ],
)
def test_sampling_options_decide_on_the_memory_of_a_token(model: str, options: dict[str, Any], kind: str) -> None:
    sampling = SamplingParams(max_new_tokens=8, **options)
    plan = make_plan(config(model, sampling=sampling, strategy=StrategyConfig()))
    rollout = next(phase for phase in plan.memory[0].phases if phase.name == "rollout")
    last = next(moment for moment in rollout.moments if moment.name == "last token")
    (logits,) = [item.bytes for item in last.items if item.what == "logits"]
    assert logits == 16 * 128 * (SAMPLE_BYTES[kind] + 4)  # fp32: 4 bytes a logit of 16 rows and 128 tokens


def test_the_algorithm_decides_on_roles_and_phases(model: str) -> None:
    one = StrategyConfig()
    grpo = make_plan(config(model, algorithm={"name": "grpo"}, strategy=one))
    assert list(grpo.roles) == ["actor"]
    assert [phase.name for phase in grpo.memory[0].phases] == ["rollout", "scoring", "actor_update"]
    single = replace(config(model).batch, update_batch_size=None)
    once = make_plan(config(model, algorithm={"name": "grpo"}, strategy=one, batch=single))
    assert [phase.name for phase in once.memory[0].phases] == ["rollout", "actor_update"], "no old log-probs are needed"
    sft = make_plan(config(model, algorithm={"name": "sft"}, strategy=one))
    assert [phase.name for phase in sft.memory[0].phases] == ["actor_update"]
    assert sft.received == ()


def test_weights_of_4_bits_need_an_adapter(model: str) -> None:
    with pytest.raises(ConfigError, match="model got quantization='nf4' without lora: weights of 4 bits cannot be"):
        make_plan(replace(config(model), model=ModelConfig(model, quantization="nf4")))


@pytest.mark.bitsandbytes
def test_weights_of_4_bits_take_less_and_no_tensor_axis(model: str) -> None:
    lora = {"r": 4, "target_modules": ["q_proj"]}
    alone = {"mesh_shape": None, "parallelism_config": {}, "hybrid_engine_config": {}}
    one = replace(config(model), strategy=replace(config(model).strategy, **alone))
    plain, small = (
        make_plan(replace(one, model=ModelConfig(model, lora=lora, quantization=quantization)), 1)
        for quantization in (None, "nf4")
    )
    # Two layers of 36,864 elements in matrices, in fp32 or in codes: 2 of 4,096, 2 of 2,048 and 3 of 8,192.
    codes = 2 * (2 * (2_048 + 64 + 8) + 2 * (1_024 + 32 + 8) + 3 * (4_096 + 128 + 8))
    assert plain.roles["actor"].parameters - small.roles["actor"].parameters == 4 * 2 * 36_864 - codes
    wide = replace(config(model), model=ModelConfig(model, lora=lora, quantization="nf4"))
    with pytest.raises(ConfigError, match=r"actor: Actor has weights of 4 bits.* tp x pp x ep = 2 x 1 x 1"):
        make_plan(wide)


def test_lora_keeps_its_adapter_of_step_0(model: str) -> None:
    lora = ModelConfig(model, lora={"r": 4, "target_modules": ["q_proj"]})
    grpo = config(model, algorithm={"name": "grpo", "kl": 0.1}, strategy=StrategyConfig())
    plan = make_plan(replace(grpo, model=lora))
    assert list(plan.roles) == ["actor"]
    held = {item.what: item.bytes for item in plan.roles["actor"].held()}
    # A of 4 x 64 and B of 64 x 4 in each of two layers
    assert held["adapter of step 0"] == 4 * 2 * 512
    assert held["optimizer state"] == 2 * 4 * 2 * 512
    assert "scoring" in [phase.name for phase in plan.memory[0].phases]


def test_gradients_and_optimizer_state_are_shown_with_an_adapter_and_in_8_bits(model: str) -> None:
    grpo = config(model, algorithm={"name": "grpo"}, strategy=StrategyConfig())
    lora = ModelConfig(model, lora={"r": 64, "target_modules": ["q_proj"]})
    # A and B of 64 x 64 in each of two layers: 4 x 16,384 bytes of gradients, two moments of as many.
    heading = "\n\nGradients and optimizer state of a rank\n  actor      "
    assert heading + "0.1 MiB and 0.1 MiB\n" in report(make_plan(replace(grpo, model=lora)))
    plan = make_plan(replace(grpo, model=lora))
    assert (plan.roles["actor"].trained, plan.roles["actor"].optimizer) == (65_536, 131_072)
    # In 8 bits each of four parameters has two moments of 4,096 + 16 x 4 + 1,024 bytes.
    small = make_plan(replace(grpo, model=lora, optimizer=OptimizerConfig(name="adamw8bit")))
    assert (small.roles["actor"].trained, small.roles["actor"].optimizer) == (65_536, 4 * 2 * 5_184)
    assert heading + "0.1 MiB and 0.0 MiB, moments in 8 bits\n" in report(small)


def layers_of(plan: Plan) -> list[str]:
    """The lines on how layers run."""
    lines = report(plan).splitlines()
    start = lines.index("On GPUs (log-probs come from logits in compiled kernels), decoder layers run") + 1
    return lines[start : lines.index("", start)]


def test_how_layers_run_is_said_and_counted(model: str) -> None:
    cut = ": their matrices are cut over a tensor axis, for which layers are not compiled yet"
    plan = make_plan(config(model))
    assert layers_of(plan) == [
        f"  actor      as they are written{cut}",
        "  critic     compiled",
        f"  reference  as they are written{cut}",
    ]
    # h = 64, q = 64, k = 32, m = 128, 4 heads, 2 for keys and values: over two tensor ranks (8 + 16) 64 + 8 + 4 (64 +
    # 32) + 8 + 16 x 64 = 2,960, and of QK-norm 8 x 48 + 4 x 3 = 396; compiled 8 x 288 + 16 + 8 = 2,328, and of QK-norm
    # 4 x 96 + 4 x 6 = 408.
    kept = {role: kept_per_token(memory.model, memory.layout.tensor) for role, memory in plan.roles.items()}
    assert kept == {"actor": 2_960 + 396, "critic": 2_328 + 408, "reference": 2_960 + 396}
    head = {moment.name: moment for moment in plan.memory[0].phases[-1].moments}["backward of the head"]
    (logits,) = [item.bytes for item in head.items if item.what == "logits"]
    assert logits == 2 * 8 * 64 * 8, "two rows of 8 tokens, half of the vocabulary, logits and their gradient"
    written = make_plan(config(model, strategy=replace(config(model).strategy, compile_layers=False)))
    assert layers_of(written)[1] == "  critic     as they are written: strategy.compile_layers=false"
    # 24 x 64 + 8 + 4 x 192 + 16 + 16 x 128 = 4,376, and of QK-norm 8 x 96 + 4 x 6 = 792
    assert kept_per_token(written.roles["critic"].model, 1) == 4_376 + 792


def test_offloaded_activations_are_on_the_host(model: str) -> None:
    one = StrategyConfig(activation_offload=True)
    run = config(model, strategy=one, batch=BatchConfig(512, 512, max_tokens_per_micro_batch=8192))
    plan = make_plan(replace(run, model=ModelConfig(model, activation_checkpointing="full")))
    # 8,192 tokens x 2 layers x 4 x 64 bytes are 4 MiB. A reference keeps nothing.
    assert [memory.on_host for memory in plan.roles.values()] == [4 * 2**20, 4 * 2**20, 0]
    assert layers_of(plan)[0] == "  actor      compiled; 0.00 GiB of activations in host memory"
    assert layers_of(plan)[2] == "  reference  compiled"


# ---- resharding of Qwen3-8B on 8 ranks -------------------------------------------------------------------------------


def plan_of_qwen3_8b(monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, int], rollout_tp: int) -> Plan:
    """The plan of examples/plan on 8 ranks."""
    monkeypatch.chdir(ROOT)
    strategy = StrategyConfig((*mesh, 1, 1), {}, {"rollout_tp": rollout_tp})
    return make_plan(replace(read_config(["examples/plan/plan.yaml"]), strategy=strategy))


def test_qwen3_8b_receives_norms_only_where_update_and_rollout_shards_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    # In bf16, 36 x (2 x 4096 + 2 x 128) + 4096 numbers of norms, of which a rank holds an eighth, or over 4 shards a
    # quarter; all the rest is where it is wanted.
    norms = 2 * (36 * 8_448 + 4_096)
    for mesh, held in (((8, 1), 8), ((4, 2), 4)):
        plan = plan_of_qwen3_8b(monkeypatch, mesh, 8)
        assert plan.received == (norms - norms // held,) * 8
        assert max(plan.received) <= 1e6
    assert "training -> rollout: 0.00 GB received at most, 0.00 GB at least; " in report(plan)


def test_qwen3_8b_receives_the_missing_half_where_the_rollout_is_coarser(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of_qwen3_8b(monkeypatch, (8, 1), 4)
    assert (plan.layouts["actor"].shards, plan.layouts["rollout"].tensor, plan.layouts["rollout"].replicas) == (8, 4, 2)
    # A quarter of matrices and vocabulary is wanted and an eighth is held; norms are wanted whole.
    norms = 2 * (36 * 8_448 + 4_096)
    rest = 2 * 8_190_735_360 - norms
    assert plan.received == (rest // 4 - rest // 8 + norms - norms // 8,) * 8
    assert plan.received[0] == pytest.approx(2.05e9, rel=2e-3)
    line = "training -> rollout: 2.05 GB received at most, 2.05 GB at least; the whole model has 16.38 GB"
    assert line in report(plan)


# ---- 1,024 ranks -----------------------------------------------------------------------------------------------------


def test_1024_ranks_by_hand(large: Plan) -> None:
    # A layer: q and o 4096^2, k and v 1024 x 4096, three of 12288 x 4096 = 192,937,984, norms of 2 x 4096 + 2 x 128.
    matrices, norms, vocabulary = 36 * 192_937_984, 36 * 8_448 + 4_096, 2 * 151_936 * 4_096
    actor, critic, reference = (large.roles[role] for role in ("actor", "critic", "reference"))
    assert actor.model.numel == matrices + norms + vocabulary == 8_190_735_360
    # 32 shards x 2 tensor ranks, which do not cut norms; fp32 masters
    held = (matrices + vocabulary) // 64 + norms // 32
    assert actor.parameters == 4 * held
    assert actor.optimizer == 8 * held
    assert reference.parameters == 2 * held, "frozen weights are held in bf16"
    assert critic.parameters == 4 * ((matrices + norms + vocabulary // 2) // 64 + 4_096)
    # The rollout over 8 ranks, bf16: 2 x (matrices + vocabulary) / 8 and the norms. Nothing is shared with fp32.
    assert actor.rollout_weights == 2 * ((matrices + vocabulary) // 8 + norms)
    # 128 copies take 8 prompts x 4 samples each of 1024 + 3072 tokens: 36 layers x 2 x 1 kv head x 128 x 2 bytes
    last = {item.what: item.bytes for item in actor.rollout(large.sizes, "sampled")["last token"]}
    assert last["key-value cache"] == 36 * 2 * 1 * 128 * 2 * (32 * 4096)
    # A prompt of 1,024 and its four responses of 3,072 are a micro-batch; "selective" keeps 2 x 2 x (4096 + 2048 + 512)
    # + 4 x 16 = 26,688 bytes a token and layer.
    assert actor.batch.micro_batch_tokens == 13_312
    layers, _ = actor.activations()
    assert layers == 13_312 * (36 * 26_688 + 12 * 4_096)


def test_the_text_for_1024_ranks(large: Plan) -> None:
    text = report(large)
    assert "Plan: PPO on 1,024 ranks, bf16-mixed, 80 GiB a GPU" in text
    assert (
        "  actor      16 x 32 x 1 x 2: 512 data ranks, ranks 0-1023\n"
        "             [0 1] [2 3] [4 5] ... [62 63]\n"
        "             [64 65] [66 67] [68 69] ... [126 127]\n"
        "             [128 129] [130 131] [132 133] ... [190 191]\n"
        "             ...\n"
        "             [960 961] [962 963] [964 965] ... [1022 1023]\n"
    ) in text
    assert "  critic     16 x 64 x 1 x 1: 1024 data ranks, ranks 0-1023\n" in text
    assert "  rollout    128 x 1 x 1 x 8: 128 data ranks, ranks 0-1023\n" in text
    # 511,940,224 bytes are 0.48 GiB; 1,023,880,448 are 0.95.
    assert re.search(r"actor parameters +0\.48 +0\.48 +0\.48 +0\.48\n", text)
    assert re.search(r"actor optimizer state +0\.95 +0\.95 +0\.95 +0\.95\n", text)
    assert re.search(r"actor key-value cache +2\.25 *\n", text)
    # Less than 120 columns, and no more lines than a screen or two.
    assert max(map(len, text.splitlines())) <= 140
    assert len(text.splitlines()) < 80


def test_traffic_of_a_micro_batch_by_hand(large: Plan) -> None:
    traffic = Traffic.of(large.roles["actor"], large.sizes, 100.0)
    assert traffic is not None
    # A tensor rank gathers half of matrices and vocabulary, and all norms, twice in bf16, and reduces it once in fp32;
    # of that a rank has 1 of 32 parts.
    rank = 36 * 192_937_984 // 2 + 308_224 + 151_936 * 4_096
    assert traffic.parameter_bytes == 8 * rank * 31 // 32
    assert traffic.parameter_seconds == pytest.approx(traffic.parameter_bytes / 100e9)
    # All-reduces of 13,312 x 4,096 bf16: four in each layer and, as it is recomputed, the one behind attention again;
    # of the embedding and of the head's gradient. Over two ranks each gets as much as that.
    assert traffic.tensor_bytes == (5 * 36 + 2) * 13_312 * 4_096 * 2
    # 6 FLOPs for each token and element of a matrix, the head included, and causal attention, over 2 tensor ranks. Of
    # the squares of four sequences of 4,096 tokens that of their prompt of 1,024 counts once.
    matmuls = 6 * (36 * 192_937_984 + 151_936 * 4_096) * 13_312
    matmuls += 6 * 36 * 4_096 * (4 * 4_096**2 - 3 * 1_024**2)
    assert traffic.matmul_seconds == pytest.approx(matmuls / 2 / 743e12)
    assert traffic.is_bound


def test_a_plan_for_1024_ranks_is_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: 12 kinds of parameters x 1,024 ranks x 2 layouts x 2 questions."""
    monkeypatch.chdir(ROOT)
    calls, original = [0], TensorLayout.region

    def counted(self: TensorLayout, *args: Any) -> Any:
        calls[0] += 1
        return original(self, *args)

    monkeypatch.setattr(TensorLayout, "region", counted)
    report(make_plan(read_config(["examples/plan/plan.yaml"]), 1024))
    assert 0 < calls[0] < 60_000


def test_roles_are_built_without_memory() -> None:
    module = build_on_meta(lambda: Critic(tiny_config("qwen3")), HybridPrecision("bf16-mixed"))
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    frozen = build_on_meta(lambda: Reference(tiny_config("qwen3")), HybridPrecision("bf16-mixed"))
    assert {parameter.dtype for parameter in frozen.parameters()} == {torch.bfloat16}


def test_the_page_shows_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    match = re.search(r"```bash\nlightning-verl (plan [^\n]*)\n```\n+```text\n(.*?)```", page, re.DOTALL)
    assert match is not None
    monkeypatch.chdir(ROOT)
    assert main(match[1].split()) == 0
    assert capsys.readouterr().out == match[2]


def test_the_page_has_the_formula_of_selective_checkpointing() -> None:
    page, docstring = (ROOT / "docs" / "plan.md").read_text(), memory.__doc__
    formula = re.search(r"^selective +(.*)$", page, re.MULTILINE)
    assert formula is not None
    assert f"``{formula[1]}``; one layer at a time" in (docstring or "")


# ---- drawings, defaults, errors --------------------------------------------------------------------------------------


def test_drawings() -> None:
    experts = RoleLayout("actor", 1, 2, 4, tuple(range(16)), expert=2)
    assert list(draw("actor", experts)) == [
        "  actor      1 x 2 x 2 x 4: 4 data ranks, ranks 0-15",
        "             ([0-3] [4-7]) ([8-11] [12-15])",
    ]
    whole = RoleLayout("reward", 3, 1, 1, (1, 2, 5))
    assert list(draw("reward", whole)) == [
        "  reward     3 x 1 x 1 x 1: 3 data ranks, ranks 1-2, 5",
        "             [1] [2] [5]",
    ]


def test_the_number_of_ranks_comes_from_the_config(model: str) -> None:
    assert default_ranks(config(model)) == 4
    assert default_ranks(config(model, devices="8")) == 8
    assert default_ranks(config(model, devices=8)) == 8
    assert default_ranks(config(model, strategy=StrategyConfig())) == 1
    assert default_ranks(config(model, devices=-1, strategy=StrategyConfig())) == 1
    claimed = {"reward": {"dp": 1, "ranks": [4]}}
    assert default_ranks(config(model, strategy=StrategyConfig((2, 2, 1, 1), claimed))) == 5


def test_all_layouts_that_do_not_fit_are_named_at_once(model: str) -> None:
    strategy = StrategyConfig((2, 2, 1, 1), {"actor": {"dp": 3, "tp": 2}, "critic": {"dp": 5}, "reward": {"tp": 0}})
    with pytest.raises(ConfigError) as error:
        make_plan(config("no/such/folder", strategy=strategy), 4)
    lines = str(error.value).splitlines()
    assert len(lines) == 3, "before the model is looked for"
    assert "parallelism_config['actor']): dp x tp x pp x ep = 3 x 2 x 1 x 1 = 6 does not equal" in lines[0]
    assert "parallelism_config['critic']): dp x tp x pp x ep = 5 x 1 x 1 x 1 = 5 does not equal" in lines[1]
    assert "parallelism_config['reward']) got tp=0" in lines[2]
    broken = StrategyConfig((2, 1, 2, 1), {"reward": {"ranks": 4}, "critic": {"dp": 1, "ranks": [4, 4]}})
    with pytest.raises(ConfigError, match=r"ranks=4; it takes a list(.|\n)*ranks=\[4, 4\]; it takes a list"):
        make_plan(config(model, strategy=broken))
    with pytest.raises(ConfigError, match=r"6 = k x \(2 x 2 x 1 x 1 = 4\)"):
        make_plan(config(model), 6)


def test_all_that_a_tensor_axis_cannot_cut_is_named_at_once(model: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(config(model, strategy=StrategyConfig((1, 8, 1, 1))), 8)
    lines = str(error.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        r for r in ("actor", "critic", "reference", "rollout") for _ in range(2)
    ]
    assert "num_key_value_heads=2, which tp=8 does not divide" in lines[0]
    assert "num_attention_heads=4, which tp=8 does not divide" in lines[1]


def test_batches_that_do_not_fit_are_named_at_once(model: str) -> None:
    batch = BatchConfig(rollout_batch_size=4, update_batch_size=8, epochs=0)
    with pytest.raises(ConfigError, match=r"epochs=0.*\n.*update_batch_size=8 > rollout_batch_size=4"):
        make_plan(config(model, batch=batch))


def test_a_model_that_is_not_here_is_not_looked_for_elsewhere() -> None:
    with pytest.raises(ConfigError, match="model.actor: 'no/model-here' is neither a folder with a config.json nor in"):
        make_plan(config("no/model-here"))


def test_prompts_without_a_limit_are_assumed(model: str) -> None:
    plan = make_plan(config(model, data=DataConfig("prompts.jsonl")), hardware=Hardware(1.0))
    assert "rows of at most 1024 + 8 = 1032 tokens (data.max_prompt_length is not set, 1024 assumed)" in report(plan)


def test_experts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    tiny_config("qwen3_moe", num_experts=6).save_pretrained(tmp_path)
    config = TrainConfig(
        model=ModelConfig(str(tmp_path)),
        data=DataConfig("prompts.jsonl"),
        algorithm={"name": "sft"},
        steps=1,
        output="out",
        strategy=StrategyConfig(mesh_shape=(1, 1, 1, 4)),
    )
    with pytest.raises(ConfigError, match=r"actor: .* has num_experts=6, which ep x tp = 4 x 1 = 4 does not divide"):
        make_plan(config)
