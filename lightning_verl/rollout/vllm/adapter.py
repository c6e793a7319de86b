"""A LoRA adapter beside the weights of a running vLLM, in place of weights with the adapter merged in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from lightning_verl.rollout.vllm.weights import reset_prefix_cache

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM makes room for."""


def split_adapter(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights without and with those of adapters, by name."""
    adapter = {name: tensor for name, tensor in weights.items() if ".lora_A." in name or ".lora_B." in name}
    return {name: tensor for name, tensor in weights.items() if name not in adapter}, adapter


def adapter_arguments(adapter: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs`` for one adapter at a time.

    Raises:
        ValueError: There is none, or its rank is larger than vLLM takes.
    """
    if not adapter:
        raise ValueError(
            "VLLMEngine: engine_options={'lora': 'adapter'}, but the actor has no adapter; give it one with "
            "Actor(lora_config=...), or leave the option out."
        )
    rank = _rank(adapter)
    if rank > _RANKS[-1]:
        raise ValueError(f"VLLMEngine: the adapter has rank {rank}, vLLM takes {_RANKS[-1]} at most; merge it.")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(room for room in _RANKS if room >= rank)}


def push_adapter(engine: Any, adapter: dict[str, Tensor], number: int, folder: Path) -> Any:
    """Put an adapter into vLLM in place of the one before, and empty the prefix cache.

    Args:
        engine: vLLM's ``LLMEngine``, made with ``adapter_arguments``.
        adapter: Both halves of each pair, B times its scale.
        number: From 1, another one for each call.
        folder: Where vLLM may read it from.

    Returns:
        What vLLM wants with each request.

    Raises:
        RuntimeError: vLLM did not take it.
    """
    from vllm.lora.request import LoRARequest

    write_adapter(adapter, folder)
    if number > 1:
        engine.remove_lora(number - 1)
    request = LoRARequest(f"adapter-{number}", number, str(folder))
    if not engine.add_lora(request):
        raise RuntimeError(f"VLLMEngine: vLLM did not take the adapter in {folder}.")
    reset_prefix_cache(engine)
    return request


def write_adapter(adapter: dict[str, Tensor], folder: Path) -> None:
    """Write an adapter as peft would, with a scale of 1.

    Args:
        adapter: By names such as ``model.layers.0.self_attn.q_proj.lora_A.default.weight``.
        folder: Is made where it does not exist.
    """
    folder.mkdir(exist_ok=True)
    tensors, targets = {}, set()
    for name, tensor in adapter.items():
        layer, half, _, _ = name.rsplit(".", 3)
        tensors[f"base_model.model.{layer}.{half}.weight"] = tensor.contiguous().cpu()
        targets.add(layer.rpartition(".")[2])
    rank = _rank(adapter)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": sorted(targets)}))
    save_file(tensors, folder / "adapter_model.safetensors")


def _rank(adapter: dict[str, Tensor]) -> int:
    return max(tensor.shape[0] for name, tensor in adapter.items() if ".lora_A." in name)
