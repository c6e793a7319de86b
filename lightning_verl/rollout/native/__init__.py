"""The native rollout engine: the actor's own module over a key-value cache in blocks."""

from lightning_verl.rollout.native.engine import NativeEngine, RolloutReport
from lightning_verl.rollout.native.options import NativeOptions

__all__ = ["NativeEngine", "NativeOptions", "RolloutReport"]
