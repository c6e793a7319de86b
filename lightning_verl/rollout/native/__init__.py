"""The native rollout engine: the actor's own module over a key-value cache in blocks."""

from lightning_verl.rollout.native.engine import NativeEngine, NativeOptions, RolloutReport

__all__ = ["NativeEngine", "NativeOptions", "RolloutReport"]
