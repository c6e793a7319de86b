"""The vLLM engine on a stand-in for vLLM: what it asks for, in which order, and what it makes of the answers."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from fake_vllm import ONE, FakeVLLM, install, loaded_engine, make_engine, responses, weights

from lightning_verl.rollout.base import FinishReason
from lightning_verl.rollout.sampling import SamplingParams, sample_seeds
from lightning_verl.rollout.vllm import VLLMEngine
from lightning_verl.rollout.vllm.sampling import check_sampling, request_options, request_seed
from lightning_verl.rollout.vllm.weights import buckets, check_complete, held_versions

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        assert not skip_special_tokens
        return "".join(LETTERS[token] for token in token_ids)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeVLLM:
    return install(monkeypatch)


# ---- weights ---------------------------------------------------------------------------------------------------------

LAST = ["tied head", "reset"]
PATHS = {
    True: ["start", "begin layers", "update", ("load", ["a.weight", "b.weight"]), "finish", "end layers", *LAST],
    False: ["reload", ("load", ["a.weight", "b.weight"]), *LAST],
}


@pytest.mark.parametrize("has_transfer", [True, False])
def test_each_update_ends_with_one_reset(monkeypatch: pytest.MonkeyPatch, has_transfer: bool) -> None:
    fake = install(monkeypatch, has_transfer=has_transfer)
    engine = make_engine()
    engine.load_weights(weights(1.0), version=0)
    assert fake.calls == PATHS[has_transfer]
    engine.generate([[5]], SamplingParams(max_new_tokens=1))
    assert fake.calls == [*PATHS[has_transfer], "add", "step"]
    fake.calls.clear()
    engine.load_weights(weights(9.0), version=0)  # that version is there
    assert fake.calls == []
    engine.load_weights(weights(3.0), version=1)
    assert fake.calls == PATHS[has_transfer]
    assert fake.loaded["b.weight"].eq(3.0).all()
    assert engine.weight_version == 1
    engine.forget_weights()
    engine.load_weights(weights(4.0), version=1)
    assert fake.loaded["b.weight"].eq(4.0).all()


def test_a_head_of_its_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, tied=False)
    loaded_engine()
    assert "tied head" not in fake.calls


def test_experts_are_packed_anew_on_the_cpu_only(fake: FakeVLLM) -> None:
    engine = make_engine()
    engine.load_weights(weights(), version=0)
    experts = engine._vllm.worker.model.experts.quant_method
    assert experts.moe_kernel is None
    experts.moe_kernel, engine._vllm.worker.device = "packed", torch.device("cuda")
    engine.load_weights(weights(), version=1)
    assert experts.moe_kernel == "packed"


def test_weights_go_in_buckets() -> None:
    pairs = [(name, torch.zeros(size)) for name, size in (("a", 2), ("b", 1), ("c", 9), ("d", 1), ("e", 2))]
    assert [[name for name, _ in bucket] for bucket in buckets(pairs, 12)] == [["a", "b"], ["c"], ["d", "e"]]
    assert list(buckets([], 12)) == []


def test_a_parameter_without_weight_is_an_error(fake: FakeVLLM) -> None:
    check_complete({"a.base_layer.weight": None, "b": None, "c.lora_A": None}, {"a.weight", "b", "d"})
    with pytest.raises(RuntimeError, match=r"2 parameters of vLLM's model got no weight, such as \['b', 'c'\]"):
        check_complete({"a": None, "b": None, "c": None}, {"a"})
    engine = loaded_engine()
    engine._vllm.worker.model.parameters["norm.weight"] = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(RuntimeError, match="got no weight"):
        engine.load_weights(weights(), version=1)
    with pytest.raises(RuntimeError, match="vLLM has no weights"):
        engine.generate([[5]], ONE)


@pytest.mark.parametrize("call", ["update", "load", "finish", "reset"])
def test_a_failed_update_leaves_no_weights_and_the_next_works(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    fake = install(monkeypatch)
    engine = loaded_engine()
    fake.fail_at = call
    fake.calls.clear()
    with pytest.raises(RuntimeError, match="failed"):
        engine.load_weights(weights(), version=1)
    assert "finish" in fake.calls  # else vLLM would take the next update for a part of this one
    assert not engine.holds(0)
    with pytest.raises(RuntimeError, match="vLLM has no weights: none were loaded, or"):
        engine.generate([[5]], ONE)
    engine.load_weights(weights(), version=1)
    assert engine.generate([[5]], SamplingParams(max_new_tokens=1)).weight_version == 1


def test_weights_must_be_there_and_whole(fake: FakeVLLM) -> None:
    engine = make_engine()
    with pytest.raises(RuntimeError, match="vLLM has no weights"):
        engine.generate([[5]], ONE)
    with pytest.raises(ValueError, match="holds no weights, got no weights for version 3"):
        engine.load_weights([], version=3)
    engine.load_weights(weights(), version=2)
    with pytest.raises(ValueError, match="holds version 2 of the weights, got no weights for version 3"):
        engine.load_weights([], version=3)
    with pytest.raises(ValueError, match=r"got an adapter \('q.lora_A.default.weight'\); merge it"):
        engine.load_weights(weights(names=("q.weight", "q.lora_A.default.weight")), version=3)
    fake.resets = False
    with pytest.raises(RuntimeError, match="did not empty its prefix cache"):
        engine.load_weights(weights(), version=3)


@pytest.mark.parametrize("has_record", [True, False])
def test_another_model_than_the_one_that_got_the_weights_is_refused(
    monkeypatch: pytest.MonkeyPatch, has_record: bool
) -> None:
    fake = install(monkeypatch, has_record=has_record)
    engine = loaded_engine()
    assert held_versions(engine._vllm) == {"0"}
    engine._vllm.worker.model = type(engine._vllm.worker.model)(fake)
    with pytest.raises(RuntimeError, match="vLLM holds version 'none' of the weights, but version 0 was loaded last"):
        engine.generate([[5]], ONE)


def test_a_version_that_vllm_does_not_confirm_is_refused(fake: FakeVLLM) -> None:
    engine = loaded_engine()
    engine._vllm.set_weight_version("7")
    with pytest.raises(RuntimeError, match="vLLM holds version '7' of the weights, but version 0 was loaded last"):
        engine.generate([[5]], ONE)


def test_an_adapter_goes_beside_weights_that_are_read_once(fake: FakeVLLM) -> None:
    half = {"q.lora_A.default.weight": torch.ones(3, 4), "q.lora_B.default.weight": torch.ones(5, 3)}
    engine = make_engine(options={"lora": "adapter"})
    engine.load_weights([*weights(), *half.items()], version=0)
    assert (fake.arguments["enable_lora"], fake.arguments["max_lora_rank"], fake.arguments["load_format"]) == (
        *(True, 8),
        "auto",
    )
    assert "weight_transfer_config" not in fake.arguments
    assert sorted(os.listdir(fake.arguments["model"])) == ["adapter", "config.json", "model.safetensors"]
    engine.generate([[5]], SamplingParams(max_new_tokens=1))
    engine.load_weights([*weights(), *half.items()], version=1)
    engine.generate([[5]], SamplingParams(max_new_tokens=1))
    first = [("add lora", 1), "reset", "add", "step"]
    assert fake.calls == [*first, ("remove lora", 1), ("add lora", 2), "reset", "add", "step"]
    assert [request.number for _, _, request in fake.requests] == [1, 2]
    engine.forget_weights()  # a checkpoint was read: the weights below may be others
    engine.load_weights([*weights(), *half.items()], version=1)
    assert fake.starts == 2
    with pytest.raises(ValueError, match="the actor has no adapter"):
        make_engine(options={"lora": "adapter"}).load_weights(weights(), version=0)


# ---- sleep -----------------------------------------------------------------------------------------------------------


def sleepy_engine(monkeypatch: pytest.MonkeyPatch, level: int, freed: int) -> VLLMEngine:
    engine = loaded_engine(options={"sleep_level": level, "kv_cache_bytes": 1000})
    engine._device = torch.device("cuda", 0)
    free = iter([5000, 5000 + freed] * 9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 10_000))
    engine._vllm.fake.calls.clear()
    return engine


def test_sleep_of_level_1_keeps_the_weights(fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sleepy_engine(monkeypatch, level=1, freed=900)
    engine.release()
    engine.release()  # it sleeps already
    assert engine.holds(0)
    engine.load_weights([], version=0)
    assert fake.calls == [("sleep", 1), ("wake", "weights"), "reset"]
    engine._device = torch.device("cpu")  # where the responses go
    engine.generate([[5]], SamplingParams(max_new_tokens=1))
    assert fake.calls[3:] == [("wake", "kv_cache"), "add", "step"]


def test_sleep_of_level_2_wants_weights_again(fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sleepy_engine(monkeypatch, level=2, freed=900)
    engine.release()
    assert not engine.holds(0)
    with pytest.raises(RuntimeError, match="or it sleeps without them"):
        engine.generate([[5]], ONE)
    with pytest.raises(ValueError, match="got no weights for version 0"):
        engine.load_weights([], version=0)
    engine.load_weights(weights(), version=0)
    assert fake.calls == [("sleep", 2), ("wake", "weights"), *PATHS[True]]


def test_a_rollout_without_generate_sleeps_again(fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sleepy_engine(monkeypatch, level=1, freed=900)
    for _ in range(2):
        engine.release()
        engine.load_weights([], version=0)
    turn = [("sleep", 1), ("wake", "weights"), "reset"]
    assert fake.calls == [*turn, ("wake", "kv_cache"), *turn]


def test_memory_that_sleep_did_not_free_is_told(fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sleepy_engine(monkeypatch, level=1, freed=400)  # of a cache of 1000 bytes
    with pytest.warns(UserWarning, match="sleeping freed 0.00 GiB, but the key-value cache alone"):
        engine.release()


def test_nothing_sleeps_on_the_cpu_or_at_level_0(fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sleepy_engine(monkeypatch, level=0, freed=0)
    engine.release()
    loaded_engine().release()
    make_engine().release()
    assert not [call for call in fake.calls if isinstance(call, tuple) and call[0] == "sleep"]


# ---- sampling --------------------------------------------------------------------------------------------------------

HANDLED = {
    "n": "requests",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "stop_token_ids": "stop_token_ids",
    "stop_strings": "StopRule",
    "seed": "requests",
}
"""Where each field of ``SamplingParams`` goes: a new field must be mapped, or refused, and then added here."""


def test_every_field_is_mapped() -> None:
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(HANDLED)
    sampling = SamplingParams(
        max_new_tokens=9,
        min_new_tokens=3,
        temperature=0.5,
        top_k=4,
        min_p=0.25,
        repetition_penalty=1.5,
        logit_bias={3: -1.0},
        stop_token_ids=(9, 2, 400),
    )
    common = {"n": 1, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    assert request_options(sampling, [2, 5], vocabulary=128) == common | {
        "max_tokens": 9,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 1.0,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "logit_bias": {3: -1.0},
        "stop_token_ids": [2, 5, 9],  # 400 has no logit
    }
    plain = request_options(SamplingParams(top_p=0.5), [], vocabulary=128)
    assert (plain["top_k"], plain["top_p"], plain["logit_bias"], plain["stop_token_ids"]) == (0, 0.5, None, [])


def test_greedy_sampling_keeps_the_whole_distribution() -> None:
    options = request_options(SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.1), [2], vocabulary=128)
    assert options["temperature"] == 0
    assert not {"top_k", "top_p", "min_p"} & options.keys()


def test_what_vllm_would_do_otherwise_is_refused(fake: FakeVLLM) -> None:
    check_sampling(SamplingParams(top_k=3, min_p=0.5))  # the same set in either order
    check_sampling(SamplingParams(temperature=0, top_p=0.5, min_p=0.5))
    engine = loaded_engine()
    with pytest.raises(ValueError, match=r"top_p=0\.5 and min_p=0\.1 together keep other tokens in vLLM"):
        engine.generate([[5]], SamplingParams(top_p=0.5, min_p=0.1))
    for temperature in (0.005, 2.5):
        with pytest.raises(ValueError, match=f"temperature is {temperature}, but vLLM samples .* from 0.01 to 2"):
            engine.generate([[5]], SamplingParams(temperature=temperature))
    assert fake.requests == []


def test_each_sample_is_a_request_with_its_own_seed(fake: FakeVLLM) -> None:
    engine = loaded_engine()
    prompts = [[1, 5, 9], [1, 1, 7]]  # 1 begins a text: none is added, none taken away
    rollouts = engine.generate(prompts, SamplingParams(n=2, max_new_tokens=2, seed=3), step=4, prompt_indices=[10, 11])
    assert [prompt for prompt, _, _ in fake.requests] == [prompts[0], prompts[0], prompts[1], prompts[1]]
    seeds = sample_seeds(3, 4, torch.tensor([10, 11]), 2).tolist()
    assert min(seeds) < 0
    assert [params.seed for _, params, _ in fake.requests] == [seed % 2**63 for seed in seeds]
    assert rollouts.prompt_rows.tolist() == [0, 0, 1, 1]
    assert request_seed(-1) == 2**63 - 1  # vLLM takes -1 for no seed


def test_responses_come_back_in_the_order_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, script=lambda prompt, seed: [prompt[-1], prompt[-1] + 1, 2, 9, 9])
    engine = loaded_engine(pad_token_id=3)
    rollouts = engine.generate([[20], [1], [30]], SamplingParams(max_new_tokens=3))
    assert responses(rollouts) == [[20, 21, 2], [1, 2], [30, 31, 2]]
    assert rollouts.finish_reasons == [FinishReason.EOS] * 3
    assert rollouts.response_ids[1].tolist() == [1, 2, 3]
    assert rollouts.logprobs.tolist() == [[-5.0, -5.25, -0.5], [-0.25, -0.5, 0.0], [-7.5, -7.75, -0.5]]
    assert {params.output_kind for _, params, _ in fake.requests} == {"final"}
    cut = engine.generate([[20]], SamplingParams(max_new_tokens=2))
    assert (responses(cut), cut.finish_reasons) == ([[20, 21]], [FinishReason.LENGTH])


def test_stop_strings_end_a_response_at_the_completing_token(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, script=lambda prompt, seed: [prompt[-1], 8, 9, 10, 11, 12])
    engine = loaded_engine(tokenizer=Letters())
    rollouts = engine.generate([[7], [4], [9]], SamplingParams(max_new_tokens=5, stop_strings=("zz", "hi", "jij")))
    assert responses(rollouts) == [[7, 8], [4, 8, 9, 10, 11], [9, 8, 9]]
    reasons = [FinishReason.STOP_STRING, FinishReason.LENGTH, FinishReason.STOP_STRING]
    assert rollouts.finish_reasons == reasons
    assert rollouts.logprobs[2].tolist() == [-2.25, -2.0, -2.25, 0.0, 0.0]
    assert len(fake.aborted) == 2
    assert {params.output_kind for _, params, _ in fake.requests} == {"delta"}
    with pytest.raises(ValueError, match=r"stop_strings=\('END',\) .* no tokenizer"):
        loaded_engine().generate([[5]], SamplingParams(max_new_tokens=4, stop_strings=("END",)))


def test_prompts_that_cannot_run_are_refused(fake: FakeVLLM) -> None:
    engine = loaded_engine(options={"max_model_len": 16})
    with pytest.raises(ValueError, match="VLLMEngine.generate: prompt 1 is empty"):
        engine.generate([[5], []], SamplingParams(max_new_tokens=4))
    with pytest.raises(ValueError, match=r"prompt 0 has 13 tokens, .* is 17, but the model has max_model_len=16"):
        engine.generate([[5] * 13], SamplingParams(max_new_tokens=4))
    with pytest.raises(ValueError, match="got 1 prompt_indices for 2 prompts"):
        engine.generate([[5], [6]], SamplingParams(max_new_tokens=4), prompt_indices=[0])
    assert fake.requests == []
    nothing = engine.generate([], SamplingParams(n=4))
    assert nothing.response_ids.shape == nothing.logprobs.shape == (0, 1)
    assert nothing.lengths.shape == nothing.prompt_rows.shape == (0,)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["add", "step"])
def test_an_error_leaves_vllm_without_requests(fake: FakeVLLM, call: str) -> None:
    engine = loaded_engine()
    fake.calls.clear()
    fake.fail_at = call
    with pytest.raises(RuntimeError, match=f"{call} failed"):
        engine.generate([[5], [6]], SamplingParams(max_new_tokens=3))
    assert engine._vllm.running == {}
    assert fake.calls[-1] == "reset"
    assert engine._vllm.worker.model_runner.execute_model_state is None
    assert responses(engine.generate([[5]], SamplingParams(max_new_tokens=3))) == [[7, 8, 9]]
    assert fake.starts == 1


def test_a_vllm_that_cannot_go_on_is_ended_and_started_again(fake: FakeVLLM) -> None:
    engine = loaded_engine()
    fake.fail_at, fake.resets = "step", False
    with (
        pytest.warns(UserWarning, match="vLLM could not go on after an error"),
        pytest.raises(RuntimeError, match="step failed"),
    ):
        engine.generate([[5]], ONE)
    assert fake.calls[-1] == "shutdown"
    with pytest.raises(RuntimeError, match="vLLM has no weights"):
        engine.generate([[5]], ONE)
    fake.resets = True
    engine.load_weights(weights(), version=0)
    assert fake.starts == 2
    assert responses(engine.generate([[5]], SamplingParams(max_new_tokens=1))) == [[7]]


def test_dropped_and_unfinished_responses_are_errors(fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded_engine()
    monkeypatch.setattr(engine._vllm, "step", lambda: engine._vllm.running.clear() or [])
    with pytest.raises(RuntimeError, match="vLLM dropped 2 of 2 requests"):
        engine.generate([[5], [6]], ONE)
    monkeypatch.undo()
    install(monkeypatch, script=lambda prompt, seed: [7])
    with pytest.raises(RuntimeError, match="ended a response after 1 tokens, without an end token"):
        loaded_engine().generate([[5]], SamplingParams(max_new_tokens=3))
