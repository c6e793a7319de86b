"""The reference engine against plain ``generate``, plain forward passes, and itself in other batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_verl.data.experience import PromptBatch
from lightning_verl.rollout.base import FinishReason, RolloutEngine, Rollouts
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.rollout.transformers import TransformersEngine

KINDS = ("qwen3", "llama", "gpt2")
PAD, EOS, VOCAB, POSITIONS = 0, 1, 32, 64
PROMPTS = [[5, 9, 13], [7], [3, 4, 8, 15, 16, 23, 30, 2], [11, 0, 12, 0]]  # the last one holds pad ids as real tokens
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEF"


def tiny_model(kind: str, positions: int = POSITIONS) -> Any:
    """Two layers, vocabulary 32, weights wide enough for peaked distributions, in eval mode."""
    torch.manual_seed(0)
    common = {"vocab_size": VOCAB, "initializer_range": 0.4, "bos_token_id": 2, "eos_token_id": EOS}
    if kind == "gpt2":
        config = GPT2Config(n_positions=positions, n_embd=16, n_layer=2, n_head=2, **common)
        return GPT2LMHeadModel(config).eval()
    common |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    common |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": positions}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**common)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**common)).eval()


def make_engine(model: Any, **changes: Any) -> TransformersEngine:
    return TransformersEngine(model, **{"pad_token_id": PAD, "eos_token_ids": [EOS], **changes})


def responses(rollouts: Rollouts) -> list[list[int]]:
    rows = zip(rollouts.response_ids.tolist(), rollouts.lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]


def logprob_lists(rollouts: Rollouts) -> list[Tensor]:
    rows = zip(rollouts.logprobs, rollouts.lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]


def forward_logprobs(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
    """Log-probs of the response from one plain forward pass over the joined sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    logprobs: Tensor = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0]


def plain_greedy(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """Twelve tokens of plain ``generate`` for one prompt, or fewer where it ends."""
    whole = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=12,
        pad_token_id=PAD,
        **options,
    )
    return list(whole[0, len(prompt) :].tolist())


class CharTokenizer:
    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        assert not skip_special_tokens
        return "".join(LETTERS[token] for token in token_ids)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


def test_engine_follows_the_protocol(llama: Any) -> None:
    engine = make_engine(llama)
    assert isinstance(engine, RolloutEngine)
    assert engine.weight_version == 0


def test_greedy_equals_plain_generate(model: Any) -> None:
    rollouts = make_engine(model).generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=12))
    for prompt, response, logprobs in zip(PROMPTS, responses(rollouts), logprob_lists(rollouts), strict=True):
        assert response == plain_greedy(model, prompt)
        torch.testing.assert_close(logprobs, forward_logprobs(model, prompt, response, 1.0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alone_equals_in_a_batch_of_unequal_lengths(model: Any, temperature: float) -> None:
    engine = make_engine(model)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=12)
    batch = engine.generate(PROMPTS, sampling)
    assert len(set(batch.lengths.tolist())) > 1 or temperature == 0
    for row, prompt in enumerate(PROMPTS):
        alone = engine.generate([prompt], sampling, prompt_indices=[row])
        assert responses(alone)[0] == responses(batch)[row]
        torch.testing.assert_close(logprob_lists(alone)[0], logprob_lists(batch)[row], atol=1e-5, rtol=0)


def test_log_probs_are_those_of_a_plain_forward_at_the_temperature(model: Any) -> None:
    sampling = SamplingParams(n=3, temperature=0.7, max_new_tokens=12)
    rollouts = make_engine(model).generate(PROMPTS, sampling)
    for row, response in enumerate(responses(rollouts)):
        prompt = PROMPTS[int(rollouts.prompt_rows[row])]
        ratio = (forward_logprobs(model, prompt, response, 0.7) - logprob_lists(rollouts)[row]).exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)


def test_log_probs_are_over_the_support_that_was_sampled(llama: Any) -> None:
    rollouts = make_engine(llama).generate(PROMPTS, SamplingParams(top_k=1, max_new_tokens=5))
    assert float(rollouts.logprobs.abs().max()) == 0.0  # one token kept: probability 1
    greedy = make_engine(llama).generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=5))
    assert torch.equal(rollouts.response_ids, greedy.response_ids)


ADJUSTED = {"repetition_penalty": 1.8, "min_new_tokens": 5, "logit_bias": {EOS: 6.0, 9: -2.0}}


def test_greedy_with_adjusted_logits_equals_plain_generate(model: Any) -> None:
    rollouts = make_engine(model).generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=12, **ADJUSTED))
    for prompt, response in zip(PROMPTS, responses(rollouts), strict=True):
        assert response == plain_greedy(
            model, prompt, repetition_penalty=1.8, min_new_tokens=5, sequence_bias={(EOS,): 6.0, (9,): -2.0}
        )
    assert 5 < min(rollouts.lengths.tolist()) <= 12
    assert FinishReason.EOS in rollouts.finish_reasons


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_does_not_depend_on_the_padding_of_a_batch(model: Any, temperature: float) -> None:
    sampling = SamplingParams(n=2, temperature=temperature, max_new_tokens=12, **ADJUSTED)
    # 9 is a pad id that the first prompt holds, too: there it is seen, in its padding elsewhere it is not.
    for pad in (PAD, 9):
        engine = make_engine(model, pad_token_id=pad)
        batch = engine.generate(PROMPTS, sampling)
        for row, prompt in enumerate(PROMPTS):
            alone = engine.generate([prompt], sampling, prompt_indices=[row])
            assert responses(alone) == responses(batch)[2 * row : 2 * row + 2]
            for sample in range(2):
                expected = logprob_lists(alone)[sample]
                torch.testing.assert_close(logprob_lists(batch)[2 * row + sample], expected, atol=1e-5, rtol=0)


def test_log_probs_are_those_of_the_adjusted_logits(llama: Any) -> None:
    sampling = SamplingParams(temperature=0.7, max_new_tokens=12, **ADJUSTED)
    rollouts = make_engine(llama).generate(PROMPTS, sampling)
    for prompt, response, logprobs in zip(PROMPTS, responses(rollouts), logprob_lists(rollouts), strict=True):
        for place, token in enumerate(response):
            before = [*prompt, *response[:place]]
            with torch.no_grad():
                logits = llama(torch.tensor([before])).logits[0, -1]
            logits[EOS] += 6.0
            logits[9] -= 2.0
            for old in set(before):
                logits[old] = logits[old] / 1.8 if logits[old] > 0 else logits[old] * 1.8
            if place < 5:
                logits[EOS] = -torch.inf
            expected = (logits / 0.7).log_softmax(-1)[token]
            torch.testing.assert_close(logprobs[place], expected, atol=1e-4, rtol=0)


def test_no_end_token_comes_before_the_minimum(llama: Any) -> None:
    engine = make_engine(llama)
    biased = {"logit_bias": {EOS: 30.0, 8: 29.0}, "stop_token_ids": (8,)}
    eager = engine.generate(PROMPTS, SamplingParams(max_new_tokens=6, **biased))
    assert eager.lengths.tolist() == [1] * 4
    patient = engine.generate(PROMPTS, SamplingParams(max_new_tokens=6, min_new_tokens=3, **biased))
    assert patient.lengths.tolist() == [4] * 4  # three that are none, then the end
    assert patient.finish_reasons == [FinishReason.EOS] * 4


def test_a_bias_out_of_the_vocabulary_is_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match=r"logit_bias names the token ids \[32\], but the vocabulary has 32 tokens"):
        make_engine(llama).generate(PROMPTS, SamplingParams(max_new_tokens=2, logit_bias={VOCAB: 1.0}))


def test_samples_of_a_prompt_are_adjacent_and_differ(llama: Any) -> None:
    engine = make_engine(llama)
    rollouts = engine.generate(PROMPTS[:2], SamplingParams(n=3, max_new_tokens=12))
    assert rollouts.prompt_rows.tolist() == [0, 0, 0, 1, 1, 1]
    assert len({tuple(response) for response in responses(rollouts)}) == 6
    # Sample numbers count from 0: one sample a prompt gives the first of each three.
    single = engine.generate(PROMPTS[:2], SamplingParams(n=1, max_new_tokens=12))
    assert responses(single) == [responses(rollouts)[0], responses(rollouts)[3]]


def test_samples_depend_on_step_index_and_seed_only(llama: Any) -> None:
    engine = make_engine(llama)
    sampling = SamplingParams(n=2, max_new_tokens=12)
    whole = responses(engine.generate(PROMPTS, sampling, step=4, prompt_indices=[40, 41, 42, 43]))
    torch.manual_seed(123)
    part = responses(engine.generate([PROMPTS[3], PROMPTS[1]], sampling, step=4, prompt_indices=[43, 41]))
    assert part == [whole[6], whole[7], whole[2], whole[3]]
    assert responses(engine.generate(PROMPTS, sampling, step=5, prompt_indices=[40, 41, 42, 43])) != whole
    assert responses(engine.generate(PROMPTS, sampling, step=4, prompt_indices=[0, 1, 2, 3])) != whole
    other_seed = SamplingParams(n=2, max_new_tokens=12, seed=1)
    assert responses(engine.generate(PROMPTS, other_seed, step=4, prompt_indices=[40, 41, 42, 43])) != whole


def test_prompt_batch_gives_ids_and_indices(llama: Any) -> None:
    batch = PromptBatch(
        ids=torch.tensor([[5, 9, 13], [7, 0, 0]]),
        lengths=torch.tensor([3, 1]),
        indices=torch.tensor([70, 71]),
        texts=["", ""],
        fields=[{}, {}],
    )
    engine = make_engine(llama)
    sampling = SamplingParams(max_new_tokens=12)
    from_lists = responses(engine.generate([[5, 9, 13], [7]], sampling, prompt_indices=[70, 71]))
    assert responses(engine.generate(batch, sampling)) == from_lists
    assert responses(engine.generate(batch, sampling, prompt_indices=[0, 1])) != from_lists


def test_plain_lists_count_from_zero_and_defaults_apply() -> None:
    engine = make_engine(tiny_model("llama", positions=300))
    default = engine.generate([[5], [6]])
    given = engine.generate([[5], [6]], SamplingParams(), step=0, prompt_indices=[0, 1])
    assert torch.equal(default.response_ids, given.response_ids)


def test_a_config_without_a_position_limit_sets_none() -> None:
    model = tiny_model("llama", positions=8)
    del model.config.max_position_embeddings
    rollouts = make_engine(model, eos_token_ids=[]).generate([[5]], SamplingParams(max_new_tokens=12))
    assert rollouts.lengths.tolist() == [12]


def test_length_reason_and_padding(llama: Any) -> None:
    rollouts = make_engine(llama, eos_token_ids=[]).generate(PROMPTS, SamplingParams(max_new_tokens=4))
    assert rollouts.finish_reasons == [FinishReason.LENGTH] * 4
    assert rollouts.lengths.tolist() == [4] * 4
    assert rollouts.response_ids.shape == rollouts.logprobs.shape == (4, 4)


@pytest.mark.parametrize("by_sampling", [True, False])
def test_stop_ids_end_a_response(llama: Any, by_sampling: bool) -> None:
    free = make_engine(llama, eos_token_ids=[]).generate(PROMPTS, SamplingParams(max_new_tokens=12))
    stop = responses(free)[0][3]
    if by_sampling:
        stopped = make_engine(llama, eos_token_ids=[]).generate(
            PROMPTS, SamplingParams(max_new_tokens=12, stop_token_ids=(stop,))
        )
    else:
        stopped = make_engine(llama, eos_token_ids=[stop]).generate(PROMPTS, SamplingParams(max_new_tokens=12))
    for row, full in enumerate(responses(free)):
        end = full.index(stop) + 1 if stop in full else len(full)
        assert responses(stopped)[row] == full[:end]
        assert stopped.finish_reasons[row] is (FinishReason.EOS if stop in full else FinishReason.LENGTH)
        torch.testing.assert_close(stopped.logprobs[row, :end], free.logprobs[row, :end], atol=1e-6, rtol=0)
        assert stopped.response_ids[row, end:].tolist() == [PAD] * (stopped.response_ids.shape[1] - end)
        assert float(stopped.logprobs[row, end:].abs().sum()) == 0.0
    assert stopped.response_ids.shape[1] == int(stopped.lengths.max())
    assert min(stopped.lengths.tolist()) <= 4 < max(stopped.lengths.tolist())


def test_end_token_at_the_limit_is_no_truncation(llama: Any) -> None:
    free = make_engine(llama, eos_token_ids=[]).generate(PROMPTS[:1], SamplingParams(max_new_tokens=4))
    response = responses(free)[0]
    assert response.index(response[3]) == 3
    stopped = make_engine(llama, eos_token_ids=[response[3]]).generate(PROMPTS[:1], SamplingParams(max_new_tokens=4))
    assert (responses(stopped)[0], stopped.finish_reasons) == (response, [FinishReason.EOS])
    assert not stopped.finish_reasons[0].is_truncated()


def test_stop_strings_end_a_response_at_the_completing_token(llama: Any) -> None:
    engine = make_engine(llama, eos_token_ids=[], tokenizer=CharTokenizer())
    free = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12))
    texts = [CharTokenizer().decode(response) for response in responses(free)]
    stop = texts[2][3:6]
    stopped = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, stop_strings=("no such text", stop)))
    for row, text in enumerate(texts):
        end = text.index(stop) + 3 if stop in text else len(text)
        assert responses(stopped)[row] == responses(free)[row][:end]
        assert stopped.finish_reasons[row] is (FinishReason.STOP_STRING if stop in text else FinishReason.LENGTH)
    assert int(stopped.lengths[2]) == 6
    assert not FinishReason.STOP_STRING.is_truncated()


def test_stop_strings_are_not_looked_for_in_the_prompt(llama: Any) -> None:
    engine = make_engine(llama, eos_token_ids=[], tokenizer=CharTokenizer())
    free = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=6))
    border = LETTERS[PROMPTS[0][-1]] + LETTERS[responses(free)[0][0]]
    assert border not in CharTokenizer().decode(responses(free)[0])
    stopped = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=6, stop_strings=(border,)))
    assert responses(stopped) == responses(free)


def test_end_token_wins_over_a_stop_string(llama: Any) -> None:
    free = make_engine(llama, eos_token_ids=[]).generate(PROMPTS[:1], SamplingParams(max_new_tokens=3))
    token = responses(free)[0][0]
    engine = make_engine(llama, eos_token_ids=[token], tokenizer=CharTokenizer())
    stopped = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=3, stop_strings=(LETTERS[token],)))
    assert (responses(stopped), stopped.finish_reasons) == ([[token]], [FinishReason.EOS])


def test_pad_may_be_an_end_token(model: Any) -> None:
    sampling = SamplingParams(n=4, max_new_tokens=20)
    separate = make_engine(model).generate(PROMPTS, sampling)
    shared = make_engine(model, pad_token_id=EOS).generate(PROMPTS, sampling)
    assert responses(shared) == responses(separate)
    assert shared.finish_reasons == separate.finish_reasons
    assert FinishReason.EOS in shared.finish_reasons
    for row, response in enumerate(responses(shared)):
        assert shared.response_ids[row, len(response) :].eq(EOS).all()
        assert (response[-1] == EOS) is (shared.finish_reasons[row] is FinishReason.EOS)
        assert EOS not in response[:-1]


def test_model_sees_exactly_the_given_ids(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    original = llama.generate

    def spy(**arguments: Any) -> Any:
        seen.update(arguments)
        return original(**arguments)

    monkeypatch.setattr(llama, "generate", spy)
    prompts = [[2, 5, 9], [2, 2, 7, 8, 9]]  # 2 is the begin token: none may be added or taken away
    make_engine(llama).generate(prompts, SamplingParams(n=2, max_new_tokens=2))
    rows = zip(seen["input_ids"], seen["attention_mask"], strict=True)
    assert [ids[mask.bool()].tolist() for ids, mask in rows] == [prompts[0], prompts[0], prompts[1], prompts[1]]
    assert seen["attention_mask"].tolist()[0] == [0, 0, 1, 1, 1]


LEAKY: list[dict[str, Any]] = [
    {"top_k": 1, "repetition_penalty": 9.0, "do_sample": True, "temperature": 0.01},
    {"max_length": 3},
    {"suppress_tokens": list(range(2, VOCAB)), "begin_suppress_tokens": [EOS], "no_repeat_ngram_size": 1},
    {"forced_bos_token_id": 9, "forced_eos_token_id": 9, "bad_words_ids": [[8]], "min_new_tokens": 12},
    {"eos_token_id": list(range(VOCAB)), "num_beams": 2, "num_return_sequences": 2, "return_dict_in_generate": True},
    {"use_cache": False, "stop_strings": ["a"], "max_time": 1e-9, "cache_implementation": "static"},
]


@pytest.mark.parametrize("defaults", LEAKY, ids=lambda defaults: next(iter(defaults)))
def test_no_generation_default_of_the_model_leaks_in(llama: Any, defaults: dict[str, Any]) -> None:
    sampling = SamplingParams(n=2, max_new_tokens=12)
    expected = make_engine(llama).generate(PROMPTS, sampling)
    leaky = tiny_model("llama")
    config = leaky.generation_config = GenerationConfig(**defaults)
    rollouts = make_engine(leaky).generate(PROMPTS, sampling)
    assert torch.equal(rollouts.response_ids, expected.response_ids)
    assert torch.equal(rollouts.logprobs, expected.logprobs)
    assert leaky.generation_config is config
    assert config.to_diff_dict() == GenerationConfig(**defaults).to_diff_dict()


def test_adapter_model_generates_without_leaks() -> None:
    wrapped = peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5)
    )
    inner = wrapped.get_base_model()
    config = inner.generation_config = GenerationConfig(top_k=1, repetition_penalty=9.0)
    rollouts = make_engine(wrapped).generate(PROMPTS, SamplingParams(max_new_tokens=12))
    expected = make_engine(tiny_model("llama")).generate(PROMPTS, SamplingParams(max_new_tokens=12))
    assert torch.equal(rollouts.response_ids, expected.response_ids)  # a fresh adapter changes nothing
    assert inner.generation_config is config


def test_training_flags_come_back_and_dropout_is_off() -> None:
    model = tiny_model("gpt2")  # its dropouts default to 0.1
    expected = make_engine(model).generate(PROMPTS, SamplingParams(max_new_tokens=8))
    model.train()
    model.transformer.h[0].mlp.eval()
    before = {name: module.training for name, module in model.named_modules()}
    modes: set[tuple[bool, bool, bool]] = set()

    def note(module: nn.Module, arguments: Any) -> None:
        modes.add((module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    for module in model.modules():
        module.register_forward_pre_hook(note)
    rollouts = make_engine(model).generate(PROMPTS, SamplingParams(max_new_tokens=8))
    assert torch.equal(rollouts.response_ids, expected.response_ids)
    assert modes == {(False, False, False)}
    assert {name: module.training for name, module in model.named_modules()} == before
    assert torch.is_grad_enabled()


def test_an_error_inside_generate_restores_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").train()
    config = model.generation_config

    def fail(**arguments: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "generate", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        make_engine(model).generate(PROMPTS, SamplingParams(max_new_tokens=3))
    assert all(module.training for module in model.modules())
    assert model.generation_config is config


def test_sampling_leaves_torchs_generator_alone(llama: Any) -> None:
    state = torch.get_rng_state()
    make_engine(llama).generate(PROMPTS, SamplingParams(max_new_tokens=3))
    assert torch.equal(torch.get_rng_state(), state)


def test_no_prompts_give_no_rows(llama: Any) -> None:
    rollouts = make_engine(llama).generate([], SamplingParams(n=4))
    assert rollouts.response_ids.shape == rollouts.logprobs.shape == (0, 1)
    assert rollouts.lengths.shape == rollouts.prompt_rows.shape == (0,)
    assert rollouts.finish_reasons == []


def test_result_types(llama: Any) -> None:
    for prompts in ([], PROMPTS):
        rollouts = make_engine(llama).generate(prompts, SamplingParams(max_new_tokens=2))
        for tensor in (rollouts.response_ids, rollouts.lengths, rollouts.prompt_rows):
            assert tensor.dtype == torch.int64
        assert rollouts.logprobs.dtype == torch.float32
        assert not rollouts.logprobs.requires_grad


def test_load_weights_only_takes_the_version(llama: Any) -> None:
    engine = make_engine(llama)
    engine.load_weights([], version=3)
    assert engine.generate([[5]], SamplingParams(max_new_tokens=1)).weight_version == engine.weight_version == 3
    with pytest.raises(
        ValueError, match="shares the trainer's weights, so it takes none, but got 'a.weight' for version 4"
    ):
        engine.load_weights([("a.weight", torch.zeros(1))], version=4)
    assert engine.weight_version == 3
    engine.release()


def test_prompts_that_cannot_run_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    assert len(responses(engine.generate([[5] * 60], SamplingParams(max_new_tokens=4)))) == 1  # 64 is just allowed
    monkeypatch.setattr(model, "generate", None)  # nothing may run
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine.generate([[5], []], SamplingParams(max_new_tokens=4))
    message = r"prompt 1 has 61 tokens, with max_new_tokens \(4\) that is 65, but .* max_position_embeddings=64"
    with pytest.raises(ValueError, match=message):
        engine.generate([[5], [5] * 61], SamplingParams(max_new_tokens=4))
    with pytest.raises(ValueError, match="got 1 prompt_indices for 2 prompts"):
        engine.generate([[5], [6]], SamplingParams(max_new_tokens=4), prompt_indices=[0])
    with pytest.raises(ValueError, match=r"stop_strings=\('END',\) .* no tokenizer"):
        engine.generate([[5]], SamplingParams(max_new_tokens=4, stop_strings=("END",)))


def test_encoder_decoder_and_headless_models_are_refused(llama: Any) -> None:
    config = T5Config(
        vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=PAD
    )
    with pytest.raises(ValueError, match="needs a causal language model .* got T5ForConditionalGeneration"):
        make_engine(T5ForConditionalGeneration(config))
    with pytest.raises(ValueError, match="needs a causal language model .* got LlamaModel"):
        make_engine(llama.model)
