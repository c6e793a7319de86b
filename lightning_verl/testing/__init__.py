"""Helpers for tests, this library's and its users': tiny models, a character tokenizer, ranks on one machine."""

from lightning_verl.testing.launcher import run_ranks
from lightning_verl.testing.tiny import tiny_config, tiny_model, tiny_rollouts
from lightning_verl.testing.tokenizer import char_tokenizer

__all__ = ["char_tokenizer", "run_ranks", "tiny_config", "tiny_model", "tiny_rollouts"]
