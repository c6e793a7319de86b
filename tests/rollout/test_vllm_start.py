"""How the vLLM engine starts, on a stand-in for vLLM: with which arguments, and what it puts back in the process."""

from __future__ import annotations

import os
import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_vllm import FakeVLLM, install, loaded_engine, make_engine, weights

from lightning_verl import Actor
from lightning_verl.rollout.base import RolloutEngine
from lightning_verl.rollout.vllm import VLLMEngine, VLLMOptions, process
from lightning_verl.rollout.vllm.options import cache_bytes, engine_arguments, longest_sequence
from lightning_verl.testing import char_tokenizer, tiny_config, tiny_model


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeVLLM:
    return install(monkeypatch)


# ---- starting --------------------------------------------------------------------------------------------------------


def test_an_old_or_missing_vllm_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.21.3"))  # type: ignore[misc]
    with pytest.raises(ImportError, match=r"needs vllm>=0\.22, but vllm 0\.21\.3 is installed .*pip install"):
        make_engine()
    with pytest.raises(ImportError, match=r"0\.21\.3 is installed"):
        Actor(tiny_model("qwen2"), tokenizer=char_tokenizer(), engine="vllm")
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]  # how Python marks a missing module
    with pytest.raises(ImportError, match="vllm is not installed"):
        make_engine()


def test_vllm_starts_at_the_first_weights_with_what_the_engine_needs(fake: FakeVLLM) -> None:
    engine = make_engine(options={"max_num_seqs": 16, "engine_args": {"block_size": 32}})
    assert isinstance(engine, RolloutEngine)
    assert fake.starts == 0
    engine.load_weights(weights(), version=0)
    folder = fake.arguments.pop("model")
    assert fake.arguments.pop("weight_transfer_config").backend == "lightning_verl"
    # qwen2: 2 layers, keys and values, 2 heads of 16, 4 bytes: 512 a token; 128 positions and a block, 16 sequences
    assert fake.arguments == {
        "block_size": 32,
        "dtype": "float32",
        "enable_prefix_caching": True,
        "enable_sleep_mode": False,
        "enforce_eager": True,
        "disable_log_stats": True,
        "generation_config": "vllm",
        "gpu_memory_utilization": 0.01,
        "kv_cache_memory_bytes": 512 * (128 + 128) * 16,
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "max_model_len": 128,
        "max_num_seqs": 16,
        "seed": 0,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 1,
    }
    assert os.listdir(folder) == ["config.json"]
    engine.load_weights(weights(), version=1)
    assert fake.starts == 1
    engine.close()
    assert not os.path.exists(folder)
    engine.load_weights(weights(), version=1)
    assert fake.starts == 2


def test_a_cuda_device_has_graphs_and_sleep() -> None:
    config, cuda = tiny_config("qwen2"), torch.device("cuda", 0)
    arguments = engine_arguments("folder", config, VLLMOptions(), torch.bfloat16, cuda)
    assert (arguments["dtype"], arguments["enforce_eager"], arguments["enable_sleep_mode"]) == ("bfloat16", False, True)
    awake = engine_arguments(
        "folder", config, VLLMOptions(sleep_level=0, engine_args={"enforce_eager": True}), torch.bfloat16, cuda
    )
    assert (awake["enforce_eager"], awake["enable_sleep_mode"]) == (True, False)


def test_the_cache_has_a_size_of_its_own() -> None:
    config = tiny_config("qwen2", max_position_embeddings=1 << 20)
    sequence = 512 * ((1 << 20) + 128)  # bytes of one sequence of full length
    assert cache_bytes(config, VLLMOptions(), torch.float32, 1) == 4 << 30
    assert cache_bytes(config, VLLMOptions(max_num_seqs=3), torch.float32, 1) == 3 * sequence
    assert cache_bytes(config, VLLMOptions(max_num_seqs=3), torch.bfloat16, 2) == 3 * sequence // 4
    longer = tiny_config("qwen2", max_position_embeddings=1 << 24)
    assert cache_bytes(longer, VLLMOptions(), torch.float32, 1) == 512 * ((1 << 24) + 128)
    assert cache_bytes(longer, VLLMOptions(kv_cache_bytes=12345), torch.float32, 1) == 12345
    assert cache_bytes(tiny_config("gpt2"), VLLMOptions(max_num_seqs=1), torch.float32, 1) == 1024 * 256


def test_options_that_cannot_be_are_refused(fake: FakeVLLM) -> None:
    with pytest.raises(ValueError, match=r"no options \['kv_cache'\]; it has max_model_len, .*engine_args"):
        make_engine(options={"kv_cache": 3})
    for name, value in (("max_num_seqs", 0), ("max_num_seqs", None), ("kv_cache_bytes", 1.5), ("max_model_len", True)):
        with pytest.raises(ValueError, match=f"VLLMOptions: {name} is {value}; it must be an integer"):
            VLLMOptions(**{name: value})
    with pytest.raises(ValueError, match="sleep_level is 3; it must be 0, 1 or 2"):
        VLLMOptions(sleep_level=3)
    with pytest.raises(ValueError, match="lora is 'both'"):
        VLLMOptions(lora="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"engine_args has \['dtype', 'seed'\], which the engine sets itself"):
        VLLMOptions(engine_args={"seed": 3, "dtype": "float16", "block_size": 32})
    with pytest.raises(ValueError, match="max_model_len is 129, but the model has max_position_embeddings=128"):
        make_engine(options={"max_model_len": 129})
    assert longest_sequence(tiny_config("gpt2"), VLLMOptions(max_model_len=64)) == 64
    assert VLLMOptions(lora="adapter").sleep_level == 1  # the weights below it are read once


def test_an_actor_refuses_engines_and_options_that_are_not_there(fake: FakeVLLM) -> None:
    model, tokenizer = tiny_model("qwen2"), char_tokenizer()
    with pytest.raises(ValueError, match="engine 'vlm'.*vllm"):
        Actor(model, tokenizer=tokenizer, engine="vlm")
    with pytest.raises(ValueError, match="'transformers' has no options"):
        Actor(model, tokenizer=tokenizer, engine="transformers", engine_options={"max_num_seqs": 3})
    with pytest.raises(ValueError, match="no options"):
        Actor(model, tokenizer=tokenizer, engine="vllm", engine_options={"seqs": 3})
    actor = Actor(model, tokenizer=tokenizer, engine="vllm", engine_options={"max_num_seqs": 3})
    assert isinstance(actor.engine, VLLMEngine)
    assert actor.engine.options.max_num_seqs == 3
    assert actor.rollout_weights == "merged"
    assert not isinstance(Actor(model, tokenizer=tokenizer).engine, VLLMEngine)  # only where it is asked for


def test_starting_leaves_the_process_as_it_was(fake: FakeVLLM) -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    expected = random.random(), np.random.rand(), torch.rand(1).item()  # noqa: S311
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    environment, setter = dict(os.environ), torch.set_num_threads
    torch.set_num_threads(3)
    loaded_engine()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected  # noqa: S311
    assert dict(os.environ) == environment
    assert torch.set_num_threads is setter
    assert torch.get_num_threads() == 3


def test_a_variable_of_the_user_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    for level in ("DEBUG", None):
        if level is None:
            monkeypatch.delenv("VLLM_LOGGING_LEVEL")
        else:
            monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
        with process.vllm_environment():
            assert os.environ["VLLM_LOGGING_LEVEL"] == (level or "ERROR")
            assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"  # the engine must run in this process
            del os.environ["HOME"]
        assert os.environ.get("VLLM_LOGGING_LEVEL") == level
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
        assert "HOME" in os.environ


def test_the_end_of_vllm_spares_a_process_group_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[str] = []
    world = SimpleNamespace(destroy=lambda: destroyed.append("vllm's"))
    state = SimpleNamespace(_WORLD=world, destroy_distributed_environment=lambda: destroyed.append("all"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    process.spare_process_group(state)
    process.spare_process_group(state)  # of the next engine
    state.destroy_distributed_environment()
    state.destroy_distributed_environment()
    assert destroyed == ["vllm's"]
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    process.spare_process_group(state)
    state.destroy_distributed_environment()
    assert destroyed == ["vllm's", "all"]


def test_vllm_divides_the_model_over_the_lines_of_the_layout(fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.tensor_lines = [[2, 0], [1, 3]]
    engine.load_weights(weights(), version=0)
    assert fake.arguments["tensor_parallel_size"] == 2
    assert fake.arguments["kv_cache_memory_bytes"] == 256 * (128 + 128) * 256  # half the heads, 256 sequences


def test_groups_are_made_of_the_ranks_in_the_given_order() -> None:
    made: list[Any] = []
    original = lambda ranks, *arguments, **options: made.append((ranks, arguments, options))  # noqa: E731
    state = SimpleNamespace(init_model_parallel_group=original)
    with process.groups_of_ranks(state, [0, 2, 1, 3]):
        state.init_model_parallel_group([[0, 1], [2, 3]], 0, "gloo", group_name="tp")
    assert made == [([[0, 2], [1, 3]], (0, "gloo"), {"group_name": "tp"})]
    assert state.init_model_parallel_group is original
