"""The rollout engine on vLLM. Importing this package does not import vLLM."""

from lightning_verl.rollout.vllm.engine import VLLMEngine
from lightning_verl.rollout.vllm.options import VLLMOptions

__all__ = ["VLLMEngine", "VLLMOptions"]
