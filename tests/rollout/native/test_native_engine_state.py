"""What the native engine takes and refuses, and how it leaves the model, after errors and interrupts too."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM

from lightning_verl import AsyncRolloutDataset
from lightning_verl.data.experience import PromptBatch
from lightning_verl.rollout.base import FinishReason, Rollouts
from lightning_verl.rollout.native import NativeEngine, NativeOptions
from lightning_verl.rollout.native import attention as attention_module
from lightning_verl.rollout.native.attention import NAME
from lightning_verl.rollout.native.runner import Runner
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.rollout.transformers import TransformersEngine
from lightning_verl.testing import char_tokenizer, tiny_model

SIZES = {"pad_token_id": 0, "eos_token_ids": [2]}
PROMPTS = [[5], list(range(20, 50)), [7, 8, 9], list(range(40, 57))]
SAMPLING = SamplingParams(n=3, max_new_tokens=20)


def native(model: Any, tokenizer: Any = None, **options: Any) -> NativeEngine:
    return NativeEngine(model, **SIZES, tokenizer=tokenizer, options=NativeOptions(**options))


def assert_same(rollouts: Rollouts, expected: Rollouts) -> None:
    assert torch.equal(rollouts.response_ids, expected.response_ids)
    assert rollouts.finish_reasons == expected.finish_reasons
    torch.testing.assert_close(rollouts.logprobs, expected.logprobs, atol=1e-5, rtol=0)


def by_transformers(model: Any, sampling: SamplingParams = SAMPLING, **options: Any) -> Rollouts:
    return TransformersEngine(model, **SIZES, **options).generate(PROMPTS, sampling)


# ---- what goes in ----------------------------------------------------------------------------------------------------


@contextmanager
def recorded(model: Any) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Token ids and positions of every forward pass."""
    passes: list[tuple[list[int], list[int]]] = []

    def note(module: nn.Module, arguments: Any, named: dict[str, Tensor]) -> None:
        passes.append((named["input_ids"][0].tolist(), named["position_ids"][0].tolist()))

    handle = model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


def test_the_model_sees_the_ids_of_the_dataset_with_one_bos(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("3+4=", "a longer prompt", "x")))
    tokenizer = char_tokenizer()
    data = AsyncRolloutDataset(file, tokenizer=tokenizer, max_prompt_length=32, num_workers=0)
    with data.loader(3) as loader:
        batch = next(iter(loader))
    engine = native(tiny_model("llama"))
    engine.generate([[3]], SamplingParams(max_new_tokens=1))  # looks at the model on its first time
    with recorded(engine.model) as passes:
        rollouts = engine.generate(batch, SamplingParams(n=2, max_new_tokens=2))
    ids = batch.token_lists()
    assert all(row[0] == tokenizer.bos_token_id and row.count(tokenizer.bos_token_id) == 1 for row in ids)
    real = sum(map(len, ids))  # behind it is padding, up to the fewest rows of a matrix product
    assert passes[0][0][:real] == [token for row in ids for token in row]
    assert passes[0][1][:real] == [place for row in ids for place in range(len(row))]
    goes_on = [row for row in range(6) if int(rollouts.lengths[row]) > 1]
    assert passes[1][0][: len(goes_on)] == [int(rollouts.response_ids[row, 0]) for row in goes_on]
    assert passes[1][1][: len(goes_on)] == [len(ids[row // 2]) for row in goes_on]
    assert len(passes) == 2


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_positions_count_from_zero_beside_any_mates(family: Any) -> None:
    """Learned positions and rotary ones: a prompt of 3 tokens with an answer of 4, alone and beside longer ones."""
    model = tiny_model(family)
    engine, sampling = native(model), SamplingParams(temperature=0, max_new_tokens=4)
    alone = engine.generate([[7, 8, 9]], sampling)
    for mates in ([[5] * 40], [[5], [6] * 17, [7] * 5]):
        batch = engine.generate([*mates, [7, 8, 9]], sampling)
        assert batch.response_ids[-1].tolist() == alone.response_ids[0].tolist()
        torch.testing.assert_close(batch.logprobs[-1], alone.logprobs[0], atol=1e-5, rtol=0)
    response = alone.response_ids[0].tolist()
    with torch.no_grad():
        ids = torch.tensor(
            [[0] * 5 + [7, 8, 9, *response]]
        )  # padded on the left, with the positions that it should have
        mask = torch.tensor([[0] * 5 + [1] * 7])
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=places).logits[0, 7:-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
    torch.testing.assert_close(alone.logprobs[0], expected, atol=1e-5, rtol=0)


def test_a_prompt_batch_gives_ids_and_indices() -> None:
    ids, lengths = torch.tensor([[5, 9, 13], [7, 0, 0]]), torch.tensor([3, 1])
    batch = PromptBatch(ids=ids, lengths=lengths, indices=torch.tensor([70, 71]), texts=["", ""], fields=[{}, {}])
    engine = native(tiny_model("llama"))
    from_lists = engine.generate([[5, 9, 13], [7]], SAMPLING, prompt_indices=[70, 71])
    assert torch.equal(engine.generate(batch, SAMPLING).response_ids, from_lists.response_ids)
    assert not torch.equal(
        engine.generate(batch, SAMPLING, prompt_indices=[0, 1]).response_ids, from_lists.response_ids
    )


def test_no_prompts_give_no_rows() -> None:
    engine = native(tiny_model("llama"))
    for sampling in (None, SamplingParams(n=4)):
        rollouts = engine.generate([], sampling)
        assert rollouts.response_ids.shape == rollouts.logprobs.shape == (0, 1)
        assert rollouts.lengths.shape == rollouts.prompt_rows.shape == (0,)
        assert rollouts.finish_reasons == []
    assert engine.report is not None
    assert (engine.report.steps, engine.report.computed_tokens) == (0, 0)
    assert_same(engine.generate(PROMPTS, SAMPLING), by_transformers(engine.model))


def test_inputs_that_cannot_run_are_refused() -> None:
    model = tiny_model("gpt2")
    engine = native(model)
    with recorded(model) as passes:
        for prompts, changes, message in (
            ([[5], []], {}, "NativeEngine.generate: prompt 1 is empty"),
            ([[5], [5] * 125], {}, r"prompt 1 has 125 tokens, with max_new_tokens \(4\) that is 129, but .*=128"),
            ([[5]], {"stop_strings": ("END",)}, r"stop_strings=\('END',\) .* no tokenizer"),
            ([[5]], {"logit_bias": {128: 1.0}}, r"logit_bias names the token ids \[128\], but the vocabulary has 128"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.generate(prompts, SamplingParams(max_new_tokens=4, **changes))
        with pytest.raises(ValueError, match="NativeEngine.generate: got 1 prompt_indices for 2 prompts"):
            engine.generate([[5], [6]], SamplingParams(max_new_tokens=4), prompt_indices=[0])
    assert len(passes) <= 1  # the look at the model
    assert engine.generate([[5] * 124], SamplingParams(max_new_tokens=4)).response_ids.shape[0] == 1  # 128 is allowed
    assert_same(engine.generate(PROMPTS, SAMPLING), by_transformers(model))


def test_attention_that_the_interface_cannot_tell_is_refused() -> None:
    """Sinks take part in the softmax; values smaller than keys do not fit the cache."""
    small: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"max_position_embeddings": 64, "intermediate_size": 16}
    sinks = GptOssForCausalLM(GptOssConfig(**small, num_key_value_heads=1, head_dim=8, num_local_experts=4)).eval()
    with pytest.raises(ValueError, match=r"GptOssAttention gives its attention s_aux"):
        native(sinks).generate([[5, 6]], SamplingParams(max_new_tokens=2))
    latent = DeepseekV3Config(
        **small, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
        num_key_value_heads=2, first_k_dense_replace=2, n_routed_experts=4, n_group=1, topk_group=1,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(latent).eval()
    with pytest.raises(ValueError, match=r"keys of 12 and values of 8"):
        native(model).generate([[5, 6]], SamplingParams(max_new_tokens=2))
    assert model.config._attn_implementation != NAME


# ---- weights that change ---------------------------------------------------------------------------------------------


def change(model: Any, seed: int = 7) -> None:
    """Other weights, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("release", [False, True])
def test_nothing_of_old_weights_is_left_in_the_cache(keep: bool, release: bool) -> None:
    """The same prompts, in groups that share them, before and after the weights change."""
    model = tiny_model("llama")
    engine = native(model, keep_kvcache=keep)
    before = engine.generate(PROMPTS, SAMPLING)
    change(model)
    engine.load_weights([], version=1)
    if release:
        engine.release()
    after = engine.generate(PROMPTS, SAMPLING)
    assert not torch.equal(after.response_ids, before.response_ids)
    fresh = native(model).generate(PROMPTS, SAMPLING)
    assert torch.equal(after.response_ids, fresh.response_ids)
    assert torch.equal(after.logprobs, fresh.logprobs)
    assert_same(after, by_transformers(model))
    assert (before.weight_version, after.weight_version) == (0, 1)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_weights_that_were_broken_leave_nothing_behind(family: Any) -> None:
    """A step that diverged, and a checkpoint that was loaded: NaN in the cache must not meet other samples."""
    model = tiny_model(family)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    engine = native(model, keep_kvcache=True)
    expected = engine.generate(PROMPTS, SAMPLING)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(torch.nan)
    broken = engine.generate([prompt + prompt for prompt in PROMPTS], SAMPLING)
    assert broken.logprobs.isnan().any()
    model.load_state_dict(good)
    assert_same(engine.generate(PROMPTS, SAMPLING), expected)


def test_keys_beyond_the_range_of_fp8_stay_finite() -> None:
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.bias.fill_(1000.0)  # e4m3 ends at 448
    rollouts = native(model, kv_cache_dtype="fp8").generate(PROMPTS, SAMPLING)
    assert rollouts.logprobs.isfinite().all()


def test_the_head_of_a_tied_model_follows_its_embedding() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    engine = native(model)
    before = engine.generate(PROMPTS, SAMPLING)
    optimizer = torch.optim.SGD([model.get_input_embeddings().weight], lr=1.0)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    after = engine.generate(PROMPTS, SAMPLING)
    assert not torch.equal(after.response_ids, before.response_ids)
    assert_same(after, by_transformers(model))


def test_adapters_take_part() -> None:
    model = peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.5)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(0))
    model.train()
    rollouts = native(model).generate(PROMPTS, SAMPLING)
    assert_same(rollouts, by_transformers(model))
    assert not torch.equal(rollouts.response_ids, by_transformers(tiny_model("llama")).response_ids)


def test_weights_are_not_taken() -> None:
    engine = native(tiny_model("llama"))
    engine.load_weights([], version=3)
    with pytest.raises(ValueError, match="NativeEngine shares the trainer's weights, .* got 'a.weight' for version 4"):
        engine.load_weights([("a.weight", torch.zeros(1))], version=4)
    assert engine.weight_version == 3


# ---- the model afterwards --------------------------------------------------------------------------------------------


def facts(model: Any) -> dict[str, Any]:
    """All that ``generate`` touches."""
    return {
        "attention": model.config._attn_implementation,
        "training": {name: module.training for name, module in model.named_modules()},
        "gradients": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "attributes": {name: set(vars(module)) for name, module in model.named_modules()},
        "grad mode": torch.is_grad_enabled(),
        "batch": attention_module._Current.batch,
    }


def mixed_model() -> Any:
    """Some modules in training mode and some not, some parameters frozen; dropout is on."""
    model = tiny_model("gpt2", resid_pdrop=0.1, attn_pdrop=0.1).train()
    model.transformer.h[0].mlp.eval()
    model.transformer.h[1].ln_1.weight.requires_grad_(False)
    return model


def test_the_model_comes_back_as_it_was() -> None:
    model = mixed_model()
    before = facts(model)
    modes: set[tuple[Any, ...]] = set()

    def note(module: Any, arguments: Any) -> None:
        modes.add((module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        assert model.config._attn_implementation == NAME

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    rollouts = native(model).generate(PROMPTS, SAMPLING)
    for handle in handles:
        handle.remove()
    assert modes == {(False, False, False)}
    assert facts(model) == before
    assert not rollouts.logprobs.requires_grad
    assert_same(rollouts, by_transformers(tiny_model("gpt2")))
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert model.transformer.h[1].attn.c_attn.weight.grad is not None


def in_forward(model: Any, error: BaseException) -> Callable[[], None]:
    """Raise in the second layer of the sixth pass; returns what takes it away."""
    calls = iter(range(100))

    def fail(module: Any, arguments: Any) -> None:
        if next(calls) == 5:
            raise error

    return model.transformer.h[1].register_forward_pre_hook(fail).remove


class FailingTokenizer:
    """Fails from some response on."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        if self.error is not None and len(token_ids) > 4:
            raise self.error
        return ""


@pytest.mark.parametrize("where", ["forward", "first look", "tokenizer"])
@pytest.mark.parametrize("error", [RuntimeError("stop here"), ValueError("stop here"), KeyboardInterrupt("stop here")])
def test_after_an_error_or_interrupt_everything_goes_on(where: str, error: BaseException) -> None:
    model = mixed_model()
    tokenizer = FailingTokenizer(error if where == "tokenizer" else None)
    engine = native(model, tokenizer=tokenizer, keep_kvcache=True)
    if where == "forward":
        engine.generate(PROMPTS, SAMPLING)
    before = facts(model)
    repair = {
        "forward": lambda: in_forward(model, error),
        "first look": lambda: model.transformer.h[1].attn.register_forward_pre_hook(raising(error)).remove,
        "tokenizer": lambda: lambda: None,
    }[where]()
    sampling = SamplingParams(n=3, max_new_tokens=20, stop_strings=("END",))
    with pytest.raises(type(error), match="stop here"):
        engine.generate(PROMPTS, sampling)
    assert facts(model) == before
    repair()
    tokenizer.error = None
    rollouts = engine.generate(PROMPTS, sampling)
    assert_same(rollouts, by_transformers(tiny_model("gpt2"), sampling, tokenizer=tokenizer))
    assert facts(model) == before
    assert FinishReason.LENGTH in rollouts.finish_reasons


def raising(error: BaseException) -> Callable[[Any, Any], None]:
    def hook(module: Any, arguments: Any) -> None:
        raise error

    return hook


def test_an_interrupt_while_the_attention_is_exchanged_is_not_covered_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    before = facts(model)

    def interrupted(index: int) -> Tensor:
        if index == 1:
            raise KeyboardInterrupt
        return torch.tensor(index)

    monkeypatch.setattr(attention_module, "_layer_tensor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        native(model).generate(PROMPTS, SAMPLING)
    assert facts(model) == before


@pytest.mark.parametrize("keep", [False, True])
def test_release_gives_the_memory_of_the_cache_back(keep: bool) -> None:
    engine = native(tiny_model("llama"), keep_kvcache=keep)
    engine.generate(PROMPTS, SAMPLING)
    assert engine._cache is not None
    memory = weakref.ref(engine._cache.data)
    engine.release()
    gc.collect()
    assert (memory() is not None) is keep
    assert_same(engine.generate(PROMPTS, SAMPLING), by_transformers(engine.model))


def test_a_cache_that_is_large_enough_is_used_again() -> None:
    engine = native(tiny_model("llama"), keep_kvcache=True)
    engine.generate(PROMPTS, SAMPLING)
    first = engine._cache
    engine.generate(PROMPTS[:2], SAMPLING)
    assert engine._cache is first
    engine.generate(PROMPTS * 2, SAMPLING)
    assert engine._cache is not first


def test_the_attention_works_inside_generate_only() -> None:
    model = tiny_model("llama")
    with (
        attention_module.paged_attention(model),
        pytest.raises(RuntimeError, match="inside NativeEngine.generate only"),
    ):
        model(torch.tensor([[5]]))


class Watch:
    """Keeps what it is told, and when."""

    def __init__(self) -> None:
        self.told: list[tuple[int, list[int]]] = []

    def finished(self, row: int, response: Any) -> None:
        self.told.append((row, list(response)))

    def meanwhile(self, busy: Any) -> None:
        assert not busy(), "on a CPU there is nothing to wait for"


def test_a_watch_is_told_of_each_sample_when_it_ends() -> None:
    engine = NativeEngine(tiny_model("qwen3"), pad_token_id=0, eos_token_ids=[2])
    watch, sampling = Watch(), SamplingParams(n=6, max_new_tokens=30, temperature=3.0, stop_token_ids=(5, 6, 7, 8, 9))
    rollouts = engine.generate([[1, 4, 5], [1, 9]], sampling, watch=watch)
    lengths = rollouts.lengths.tolist()
    assert len(set(lengths)) > 3, "the case must have unequal lengths to show anything"
    assert sorted(watch.told) == [
        (row, ids[:length])
        for row, (ids, length) in enumerate(zip(rollouts.response_ids.tolist(), lengths, strict=True))
    ]
    told_in_order = [len(ids) for _, ids in watch.told]
    assert told_in_order == sorted(told_in_order), "all began together, so that the shortest end first"
    again = engine.generate([[1, 4, 5], [1, 9]], sampling)
    assert again.response_ids.tolist() == rollouts.response_ids.tolist()
    assert len(watch.told) == 12, "the next rollout is another's"


def test_the_host_is_lent_until_the_device_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """An event that is through when it is asked for the third time."""

        def __init__(self) -> None:
            self.asked, self.recorded = 0, False

        def record(self) -> None:
            self.recorded = True

        def query(self) -> bool:
            assert self.recorded
            self.asked += 1
            return self.asked == 3

    class Turns(Watch):
        turns = 0

        def meanwhile(self, busy: Any) -> None:
            while busy():
                self.turns += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    runner = object.__new__(Runner)
    runner.cache, runner.watch = SimpleNamespace(data=SimpleNamespace(device=torch.device("cuda", 0))), Turns()
    runner.let_others_run()
    assert runner.watch.turns == 2
    runner.watch = None
    runner.let_others_run()
