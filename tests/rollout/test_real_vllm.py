"""vLLM itself, on the CPU in float32, against transformers and against plain forward passes.

vLLM runs in processes of its own, which send back what it generated: starting it takes seconds, and some of what it
does to a process cannot be undone. All families share one process.
"""

from __future__ import annotations

import functools
import math
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from lightning_verl import Actor, HybridStrategy
from lightning_verl.quickstart.curves import read_logs
from lightning_verl.rollout.base import FinishReason, Rollouts
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.rollout.transformers import TransformersEngine
from lightning_verl.rollout.vllm import VLLMEngine
from lightning_verl.rollout.vllm.weights import held_versions
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model
from lightning_verl.testing.tiny import Family

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

FAMILIES = get_args(Family)
"""qwen2, gpt2 and the gemmas tie their heads, gpt2 has learned positions, qwen3_moe packed experts; mistral's layers
see 8 tokens, one of two of gemma2 and gemma3 sees 20; gemma2 caps scores and logits."""
SCALES = {"gemma": 0.2, "gemma2": 0.03, "gemma3": 0.03}
"""Of their weights: at the usual one the embedding, scaled up and tied to the head, outweighs the layers, so that
greedy decoding repeats the last token for ever. At 0.3 rounding to fp32 moves log-probs of gemma by 8e-5, at 0.2 by
1e-5."""
LONG = list(range(3, 73))
"""More than two blocks of vLLM's cache, so that its start is taken from the prefix cache."""
PROMPTS = [[1, 5, 9], [7], LONG, [11, 0, 12, 0], [3, 4, 8, 15, 16, 23, 30, 2]]  # pad and end tokens in prompts are real
BLOCKS = {"engine_args": {"block_size": 32}}
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)
SAMPLINGS = {
    "temperature": SamplingParams(temperature=0.7, max_new_tokens=12, n=2, seed=5),
    "top_k": SamplingParams(temperature=1.3, top_k=7, max_new_tokens=12, n=2),
    "top_p": SamplingParams(top_k=50, top_p=0.8, max_new_tokens=12, n=2),
    "min_p": SamplingParams(top_k=50, min_p=0.1, max_new_tokens=12, n=2),
    "penalty": SamplingParams(repetition_penalty=1.3, logit_bias={5: 2.0, 9: -math.inf}, max_new_tokens=12, n=2),
    "greedy penalty": SamplingParams(temperature=0, repetition_penalty=1.3, logit_bias={5: 2.0}, max_new_tokens=12),
    "minimum": SamplingParams(min_new_tokens=4, stop_token_ids=tuple(range(3, 64)), max_new_tokens=12, n=2),
}
CROWD = [[3 + (7 * row + 5 * place) % 60 for place in range(40 + row)] for row in range(8)]
CROWDED = SamplingParams(temperature=0, max_new_tokens=60)
SMALL_CACHE = 15 * 2 * 2 * 32 * 2 * 32 * 4
"""Bytes of 15 blocks (layers x keys and values x 32 tokens x 2 heads of 32 x fp32), of which ``CROWD`` needs up to 4
a sequence, 32 in all."""
SPOTS = ("schedule", "execute_model", "sample_tokens", "update_from_output", "process_outputs", "add_request")
"""Calls within a step of vLLM that an interrupt comes before and after."""


def make_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A tiny model with heads of 32, the smallest that vLLM's attention takes on the CPU."""
    heads = {"n_head": 2} if family == "gpt2" else {"num_attention_heads": 2, "num_key_value_heads": 2}
    entries = {**heads, **({"initializer_range": SCALES[family]} if family in SCALES else {}), **overrides}
    return tiny_model(family, seed=seed, **entries)  # type: ignore[arg-type]


def make_engine(family: str, **changes: Any) -> VLLMEngine:
    options = {"max_num_seqs": 16, **BLOCKS}
    return VLLMEngine(make_model(family), **{"pad_token_id": 0, "eos_token_ids": [2], "options": options, **changes})


def reference(model: Any, prompts: list[list[int]], sampling: SamplingParams) -> Rollouts:
    return TransformersEngine(model, pad_token_id=0, eos_token_ids=[2]).generate(prompts, sampling)


def responses(rollouts: Rollouts) -> list[list[int]]:
    rows = zip(rollouts.response_ids.tolist(), rollouts.lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]


# ---- what runs beside vLLM -------------------------------------------------------------------------------------------


def generate_with_every_family() -> dict[str, Any]:
    """Rollouts of each family with two versions of weights, and what became of the process."""
    found: dict[str, Any] = {}
    random.seed(5)
    torch.manual_seed(5)
    setter, states = torch.set_num_threads, (random.getstate(), torch.get_rng_state())
    environment = dict(os.environ)
    for family in FAMILIES:
        engine = make_engine(family)
        for version in (0, 1):
            engine.load_weights(make_model(family, seed=version).named_parameters(), version)
            found[family, "held", version] = held_versions(engine._vllm)
            found[family, "greedy", version] = engine.generate(PROMPTS, GREEDY)
        alone = [engine.generate([prompt], GREEDY, prompt_indices=[row]) for row, prompt in enumerate(PROMPTS)]
        found[family, "alone"] = [responses(rollouts)[0] for rollouts in alone]
        for name, sampling in SAMPLINGS.items():
            found[family, name] = engine.generate(PROMPTS, sampling, step=3)
        one = SAMPLINGS["temperature"]
        found[family, "sampled alone"] = [
            response
            for row, prompt in enumerate(PROMPTS)
            for response in responses(engine.generate([prompt], one, step=3, prompt_indices=[row]))
        ]
        if family == "llama":
            found |= interrupts(engine)
        engine.close()
    found["stopped"] = stop_at_strings()
    found["threads"] = torch.set_num_threads is setter, torch.get_num_threads()
    found["random"] = states[0] == random.getstate(), torch.equal(states[1], torch.get_rng_state())
    found["environment"] = {
        name for name in environment.keys() | os.environ.keys() if environment.get(name) != os.environ.get(name)
    }
    found["process group"] = dist.is_initialized()
    found["adapters"] = roll_out_adapters()
    return found


def interrupts(engine: VLLMEngine) -> dict[str, Any]:
    """Greedy responses after an interrupt at each place of a step, and how vLLM was left."""
    core = engine._vllm.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    owners = {"schedule": core.scheduler, "execute_model": runner, "sample_tokens": runner}
    owners |= {"update_from_output": core.scheduler, "process_outputs": engine._vllm.output_processor}
    owners |= {"add_request": engine._vllm}
    found: dict[str, Any] = {}
    vllm = engine._vllm
    for name in SPOTS:
        for number in (1, 2):
            for after in (False, True):
                raised = interrupted(engine, owners[name], name, number, after)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    found[f"{name} {number} {after}"] = raised and responses(engine.generate(PROMPTS, GREEDY))
    found["same vllm"] = vllm is engine._vllm
    return found


def interrupted(engine: VLLMEngine, owner: Any, name: str, number: int, after: bool) -> bool:
    """Interrupt a generate before or after a call, and tell whether it was."""
    original, calls = getattr(owner, name), 0

    def interrupt(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*arguments, **options) if calls < number or after else None
        if calls == number:
            raise KeyboardInterrupt
        return result

    setattr(owner, name, interrupt)
    try:
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, n=2))
    except KeyboardInterrupt:
        return True
    finally:
        setattr(owner, name, original)
    return False


@functools.cache
def results() -> dict[Any, Any]:
    return run_ranks(generate_with_every_family, 1, timeout=280)[0]


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_for_each_version(family: str) -> None:
    found = results()
    for version in (0, 1):
        rollouts, expected = found[family, "greedy", version], reference(make_model(family, version), PROMPTS, GREEDY)
        assert responses(rollouts) == responses(expected)
        assert rollouts.finish_reasons == expected.finish_reasons
        torch.testing.assert_close(rollouts.logprobs, expected.logprobs, atol=1e-5, rtol=0)
        assert rollouts.weight_version == version
        assert found[family, "held", version] == {str(version)}
        assert max(len(set(response)) for response in responses(rollouts)) > 2  # no token is merely repeated
    assert responses(found[family, "greedy", 0])[2] != responses(found[family, "greedy", 1])[2]
    assert found[family, "alone"] == responses(found[family, "greedy", 1])


def adjusted(logits: Tensor, seen: set[int], produced: int, ends: set[int], sampling: SamplingParams) -> Tensor:
    """Log-probs that a token is sampled with, from the model's logits ``[V]``, written out by hand."""
    logits = logits.clone()
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    for token in seen:
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
    if produced < sampling.min_new_tokens:
        logits[sorted(ends)] = -math.inf
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        logits[logits < logits.topk(sampling.top_k).values[-1]] = -math.inf
    if sampling.top_p < 1:
        values, order = logits.softmax(-1).sort(descending=True)
        logits[order[values.cumsum(-1) - values >= sampling.top_p]] = -math.inf
    logits[logits.softmax(-1) < sampling.min_p * logits.softmax(-1).max()] = -math.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_distribution_that_was_sampled(family: str, name: str) -> None:
    sampling, rollouts, model = SAMPLINGS[name], results()[family, name], make_model(family, seed=1)
    ends = {2, *sampling.stop_token_ids}
    rows = zip(rollouts.prompt_rows.tolist(), responses(rollouts), rollouts.logprobs, strict=True)
    for row, response, logprobs in rows:
        prompt = PROMPTS[row]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        for place, token in enumerate(response):
            seen = {*prompt, *response[:place]}
            expected = adjusted(logits[place], seen, place, ends, sampling)
            assert logprobs[place].item() == pytest.approx(expected[token].item(), abs=2e-5)
            if sampling.temperature == 0:
                assert token == expected.argmax()
        assert len(response) > sampling.min_new_tokens
        assert not set(response[:-1]) & (ends if len(response) < 12 or response[-1] in ends else set())
    assert rollouts.logprobs.min() < -0.5  # not all samples are the likeliest


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_depends_on_its_seed_and_not_on_its_batch(family: str) -> None:
    found = results()
    assert found[family, "sampled alone"] == responses(found[family, "temperature"])
    pairs = [found[family, "sampled alone"][row : row + 2] for row in range(0, 10, 2)]
    assert any(first != second for first, second in pairs)  # the two samples of a prompt have different seeds


def test_an_interrupt_anywhere_leaves_vllm_usable() -> None:
    found, expected = results(), responses(results()["llama", "greedy", 1])
    for name in SPOTS:
        for number in (1, 2):
            for after in (False, True):
                assert found[f"{name} {number} {after}"] == expected, (name, number, after)
    assert found["same vllm"]


def test_the_process_is_left_as_it_was() -> None:
    found = results()
    assert found["threads"] == (True, 1)
    assert found["random"] == (True, True)
    assert not {name for name in found["environment"] if "TORCHINDUCTOR" not in name}  # torch's compiler sets some
    assert not found["process group"]


def stop_at_strings() -> tuple[list[list[int]], list[FinishReason], list[list[int]]]:
    engine = make_engine("llama", tokenizer=char_tokenizer(), eos_token_ids=[])
    engine.load_weights(make_model("llama").named_parameters(), 0)
    free = responses(engine.generate(PROMPTS, GREEDY))
    stop = char_tokenizer().decode(free[2][3:6], skip_special_tokens=False)
    stopped = engine.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=12, stop_strings=("no such", stop)))
    engine.close()
    return responses(stopped), stopped.finish_reasons, free


def test_a_stop_string_ends_a_response_at_the_completing_token() -> None:
    stopped, reasons, free = results()["stopped"]
    assert stopped[2] == free[2][:6]
    assert reasons[2] is FinishReason.STOP_STRING
    for row, response in enumerate(stopped):
        assert response == free[row][: len(response)]
        assert (reasons[row] is FinishReason.LENGTH) is (len(response) == 12)


def generate_in_small_caches() -> dict[str, tuple[Rollouts, int]]:
    return {family: generate_in_a_small_cache(family) for family in FAMILIES}


@functools.cache
def crowded() -> dict[str, tuple[Rollouts, int]]:
    return run_ranks(generate_in_small_caches, 1, timeout=280)[0]


def generate_in_a_small_cache(family: str) -> tuple[Rollouts, int]:
    """Greedy responses from a cache that cannot hold them together, and how many requests vLLM put off."""
    engine = make_engine(family, options={"max_num_seqs": 16, "kv_cache_bytes": SMALL_CACHE, **BLOCKS})
    engine.load_weights(make_model(family).named_parameters(), 0)
    engine.generate([CROWD[0]], GREEDY)  # starts vLLM
    scheduler = engine._vllm.engine_core.engine_core.scheduler
    original, preemptions = scheduler._preempt_request, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal preemptions
        preemptions += 1
        return original(*arguments, **options)

    scheduler._preempt_request = counted
    rollouts = engine.generate(CROWD, CROWDED)
    engine.close()
    return rollouts, preemptions


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_vllm_puts_off_end_as_if_they_had_not_been(family: str) -> None:
    rollouts, preemptions = crowded()[family]
    assert preemptions >= 1
    expected = reference(make_model(family), CROWD, CROWDED)
    assert responses(rollouts) == responses(expected)
    assert max(len(response) for response in responses(rollouts)) == 60
    torch.testing.assert_close(rollouts.logprobs, expected.logprobs, atol=1e-5, rtol=0)


# ---- under the strategy ----------------------------------------------------------------------------------------------


def roll_out_and_train(tensor: int, mesh: tuple[int, int, int, int], tied: bool) -> list[tuple[Rollouts, bool]]:
    """Two rollouts with a step between that halves every weight; whether the process group outlived vLLM."""
    strategy = HybridStrategy(mesh, hybrid_engine_config={"rollout_tp": tensor})
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    model = make_model("qwen3", tie_word_embeddings=tied)
    actor = Actor(model, tokenizer=char_tokenizer(), engine="vllm", engine_options={"max_num_seqs": 16})
    wrapped = fabric.setup_module(actor)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(wrapped.parameters(), lr=0.5))
    found = []
    for _ in range(2):
        with strategy.rollout(actor) as engine:
            found.append(engine.generate(PROMPTS, GREEDY))
        for parameter in actor.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return [(rollouts, dist.is_initialized()) for rollouts in found]


@pytest.mark.parametrize(
    ("tensor", "mesh", "tied"),
    [(2, (2, 1, 1, 1), True), (1, (2, 1, 1, 1), False), (2, (4, 1, 1, 1), False)],
    ids=["two tensor ranks", "two copies", "two copies of two tensor ranks, 0 2 and 1 3"],
)
def test_several_ranks_generate_as_one(tensor: int, mesh: tuple[int, int, int, int], tied: bool) -> None:
    ranks = run_ranks(roll_out_and_train, mesh[0], tensor, mesh, tied, timeout=200)
    model = make_model("qwen3", tie_word_embeddings=tied)
    for version in (0, 1):
        expected = reference(model, PROMPTS, GREEDY)
        for rollouts, group_lives in (rank[version] for rank in ranks):
            assert responses(rollouts) == responses(expected)
            torch.testing.assert_close(rollouts.logprobs, expected.logprobs, atol=1e-5, rtol=0)
            assert rollouts.weight_version == version
            assert group_lives
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)


def roll_out_adapters() -> dict[str, Any]:
    """Rollouts of an actor with an adapter in both ways, each beside those of transformers on the trained model."""
    found: dict[str, Any] = {}
    for lora in ("merged", "adapter"):
        strategy = HybridStrategy()
        fabric = Fabric(accelerator="cpu", strategy=strategy)
        fabric.launch()
        actor = Actor(
            make_model("qwen2"),
            tokenizer=char_tokenizer(),
            engine="vllm",
            engine_options={"lora": lora, "max_num_seqs": 16},
            lora_config={"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        )
        fabric.setup_module(actor)
        torch.manual_seed(3)
        for step in range(2):
            for parameter in actor.parameters():
                if parameter.requires_grad:
                    parameter.data.add_(0.2 * torch.randn_like(parameter))
            strategy._versions["actor"] = step
            before = [parameter.detach().clone() for parameter in actor.parameters()]
            with strategy.rollout(actor) as engine:
                rollouts = engine.generate(PROMPTS, GREEDY)
            same = all(torch.equal(old, new) for old, new in zip(before, actor.parameters(), strict=True))
            found[f"{lora} {step}"] = rollouts, reference(actor.model, PROMPTS, GREEDY), same
        engine.close()
    return found


def test_adapters_reach_vllm_merged_and_beside_the_weights() -> None:
    found = results()["adapters"]
    for name, (rollouts, expected, same) in found.items():
        assert responses(rollouts) == responses(expected), name
        torch.testing.assert_close(rollouts.logprobs, expected.logprobs, atol=1e-5, rtol=0)
        assert same, "a rollout must not change the trained weights"
    assert responses(found["merged 0"][0]) != responses(found["merged 1"][0])


def test_the_quick_start_runs_on_vllm(tmp_path: Path) -> None:
    words = ["quickstart", "--engine", "vllm", "--sft-steps", "2", "--rl-steps", "2", "--output", str(tmp_path / "run")]
    command = [sys.executable, "-m", "lightning_verl", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("greedy accuracy: 0.")
    logs = read_logs(tmp_path / "run" / "logs")
    gaps = [row["actor/rollout_gap_max"] for row in logs.values() if "actor/rollout_gap_max" in row]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4  # vLLM generated with the trained weights of each step
