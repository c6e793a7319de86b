"""A stand-in for vLLM that writes down what it is asked for, and answers with tokens of a script.

It has the names of vLLM that the engine uses, no more: another one is an ImportError or AttributeError.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_verl.rollout.base import Rollouts
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.rollout.vllm import VLLMEngine
from lightning_verl.testing import tiny_model

ONE = SamplingParams(max_new_tokens=1)


@dataclass
class FakeVLLM:
    """What the stand-in is told, and what it was asked for."""

    script: Callable[[list[int], int], list[int]] = lambda prompt, seed: [7, 8, 9, 10, 11, 12, 13, 14]
    """The tokens that follow a prompt, of which a request takes what its limits let it."""
    has_transfer: bool = True
    """Whether a transfer engine may be registered, as from vLLM 0.22 on."""
    tied: bool = True
    """Whether the model's head is tied."""
    has_record: bool = True
    """Whether it keeps a version of its weights, as newer ones do."""
    fail_at: str | None = None
    """The call that raises, once."""
    resets: bool = True
    """Whether the prefix cache can be emptied."""
    calls: list[Any] = field(default_factory=list)
    """Calls in their order, without requests."""
    requests: list[Any] = field(default_factory=list)
    """``(prompt, parameters, lora_request)`` of each request."""
    aborted: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    """What vLLM was started with, last."""
    starts: int = 0
    loaded: dict[str, Tensor] = field(default_factory=dict)
    """The weights that it has now."""

    def note(self, call: Any) -> None:
        """Write a call down, or fail."""
        self.calls.append(call)
        if call == self.fail_at or (isinstance(call, tuple) and call[0] == self.fail_at):
            self.fail_at = None
            raise RuntimeError(f"{call} failed")


class _Head:
    """A head whose packed copy is made by its quant_method."""

    def __init__(self, fake: FakeVLLM) -> None:
        self.quant_method = SimpleNamespace(process_weights_after_loading=lambda module: fake.note("tied head"))


class _Model:
    def __init__(self, fake: FakeVLLM) -> None:
        self._fake, self._head = fake, _Head(fake)
        self.experts = SimpleNamespace(quant_method=SimpleNamespace(moe_kernel="packed"))
        self.parameters: dict[str, nn.Parameter] = {}

    def named_modules(self, remove_duplicate: bool) -> list[tuple[str, Any]]:
        assert not remove_duplicate  # a tied head may be the embedding itself
        return [("", self), ("model.embed", SimpleNamespace()), ("lm_head", self._head)]

    def modules(self) -> list[Any]:
        return [self, self.experts, self._head]

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.parameters.items()

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        named = dict(pairs)
        self._fake.note(("load", list(named)))
        self._fake.loaded.update({name: tensor.clone() for name, tensor in named.items()})
        return set(named)


class _Worker:
    """vLLM's worker, without the calls for weight updates."""

    def __init__(self, fake: FakeVLLM, transfer: Any) -> None:
        self.fake, self.device = fake, torch.device("cpu")
        self.model = _Model(fake)
        config = SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=fake.tied))
        self.model_runner = SimpleNamespace(get_model=lambda: self.model, model_config=config, execute_model_state=1)
        self.transfer = transfer
        if transfer is not None:
            transfer.model, transfer.model_config = self.model, None

    def reload_weights(self, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        self.fake.note("reload")
        self.model.load_weights(weights_iterator)

    def start_weight_update(self) -> None:
        self.fake.note("start")
        self.transfer.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.fake.note("update")
        self.transfer.receive_weights(self.transfer.update_info_cls(**update_info))

    def finish_weight_update(self) -> None:
        self.fake.note("finish")
        self.transfer.finish_weight_update()


@dataclass
class _Running:
    prompt: list[int]
    params: Any
    left: list[int]
    produced: int = 0


class _LLMEngine:
    """One token for each running request in a step; a prompt's last token and the seed choose the script."""

    fake: FakeVLLM

    def __init__(self, arguments: dict[str, Any]) -> None:
        fake = self.fake
        fake.starts += 1
        fake.arguments = arguments
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(kv_cache_memory_bytes=arguments["kv_cache_memory_bytes"])
        )
        self.engine_core = SimpleNamespace(shutdown=lambda: fake.note("shutdown"))
        factory = sys.modules["vllm.distributed.weight_transfer.factory"].WeightTransferEngineFactory
        config = arguments.get("weight_transfer_config")
        self.worker = _Worker(fake, factory.registered[config.backend]() if config else None)
        self.running: dict[str, _Running] = {}
        self.version = "default"
        if fake.has_record:
            self.set_weight_version, self.get_weight_version = self._set_version, lambda: self.version
        _disturb_process()

    @classmethod
    def from_engine_args(cls, arguments: dict[str, Any]) -> _LLMEngine:
        return cls(arguments)

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        if isinstance(method, str):
            return [getattr(self.worker, method)(*args)]
        return [method(self.worker, *args)]

    def reset_prefix_cache(self) -> bool:
        self.fake.note("reset")
        return self.fake.resets and not self.running

    def _set_version(self, version: str) -> None:
        self.version = version

    def add_request(self, name: str, prompt: dict[str, Any], params: Any, lora_request: Any = None) -> None:
        self.fake.note("add")
        ids = prompt["prompt_token_ids"]
        self.fake.requests.append((ids, params, lora_request))
        self.running[name] = _Running(ids, params, self.fake.script(ids, params.seed)[: params.max_tokens])

    def step(self) -> list[Any]:
        self.fake.note("step")
        outputs = []
        for name, request in list(self.running.items()):
            token = request.left[request.produced]
            request.produced += 1
            ended = request.produced == len(request.left) or token in request.params.stop_token_ids
            delta = request.params.output_kind == "delta"
            if ended or delta:
                tokens = request.left[request.produced - 1 : request.produced] if delta else None
                tokens = tokens or request.left[: request.produced]
                logprobs = [{token: SimpleNamespace(logprob=-token / 4)} for token in tokens]
                completion = SimpleNamespace(token_ids=tuple(tokens), logprobs=logprobs)
                outputs.append(SimpleNamespace(request_id=name, finished=ended, outputs=[completion]))
            if ended:
                del self.running[name]
        return outputs[::-1]  # the order of the requests means nothing

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def abort_request(self, names: list[str]) -> None:
        self.fake.aborted.extend(names)
        for name in names:
            self.running.pop(name, None)

    def sleep(self, level: int) -> None:
        self.fake.note(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.fake.note(("wake", *tags))

    def add_lora(self, request: Any) -> bool:
        self.fake.note(("add lora", request.number))
        return True

    def remove_lora(self, number: int) -> bool:
        self.fake.note(("remove lora", number))
        return True


def _disturb_process() -> None:
    """What starting vLLM does to a process, on the CPU."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads = lambda threads: None
    os.environ["LD_PRELOAD"] = "libtcmalloc.so"
    os.environ["LOCAL_WORLD_SIZE"] = "1"


def install(monkeypatch: pytest.MonkeyPatch, **told: Any) -> FakeVLLM:
    """Put the stand-in in the place of vLLM, installed or not.

    Args:
        monkeypatch: Takes it away again.
        told: Fields of ``FakeVLLM``.
    """
    fake = FakeVLLM(**told)

    class Factory:
        registered: dict[str, type] = {}

        @classmethod
        def register_engine(cls, name: str, engine: type) -> None:
            if name in cls.registered:
                raise ValueError("registered already")
            cls.registered[name] = engine

    def transfer_config(backend: str) -> SimpleNamespace:
        if not fake.has_transfer:
            raise ValueError("backend must be 'nccl' or 'ipc'")
        return SimpleNamespace(backend=backend)

    engine = type("LLMEngine", (_LLMEngine,), {"fake": fake})
    state = SimpleNamespace(_WORLD=None, destroy_distributed_environment=lambda: fake.note("destroy"))
    lora = lambda name, number, path: SimpleNamespace(name=name, number=number, path=path)  # noqa: E731
    contents: dict[str, dict[str, Any]] = {
        "vllm": {
            "__version__": "0.26.0",
            "EngineArgs": dict,
            "LLMEngine": engine,
            "SamplingParams": lambda **options: SimpleNamespace(**options),
        },
        "vllm.config": {"WeightTransferConfig": transfer_config},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA="delta", FINAL_ONLY="final")},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": lora},
        "vllm.distributed": {"parallel_state": state},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": object,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": Factory},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: fake.note("begin layers"),
            "finalize_layerwise_reload": lambda model, config: fake.note("end layers"),
        },
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def make_engine(**changes: Any) -> VLLMEngine:
    """An engine that has not started."""
    return VLLMEngine(tiny_model("qwen2"), **{"pad_token_id": 0, "eos_token_ids": [2], **changes})


def weights(value: float = 1.0, names: tuple[str, ...] = ("a.weight", "b.weight")) -> list[tuple[str, Tensor]]:
    """Weights of one value."""
    return [(name, torch.full((2, 3), value)) for name in names]


def loaded_engine(**changes: Any) -> VLLMEngine:
    """An engine with weights of version 0."""
    engine = make_engine(**changes)
    engine.load_weights(weights(), version=0)
    return engine


def responses(rollouts: Rollouts) -> list[list[int]]:
    """The tokens of each response, without padding."""
    rows = zip(rollouts.response_ids.tolist(), rollouts.lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]
