"""What can be chosen about the native engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_verl.strategies.cache import KVDtype, check_cache


@dataclass(frozen=True)
class NativeOptions:
    """How the native engine uses memory.

    Raises:
        ValueError: A value is out of its range.
    """

    kv_cache_dtype: KVDtype = "auto"
    """What keys and values are kept as: as the model computes them ("auto"), "bfloat16", or "fp8" (e4m3, unscaled)."""
    kv_cache_bytes: int | None = None
    """Most memory of the cache on each rank; None takes what a rollout needs, as far as it is free at that moment."""
    offload_kvcache: bool = False
    """Whether samples that have to step back leave their blocks in host memory, instead of being computed again."""
    keep_kvcache: bool = False
    """Whether the cache stays between rollouts; else its memory is the update's."""

    cuda_graphs: bool = True
    """Whether decoding on a GPU is captured as CUDA graphs; else the host launches every kernel."""
    compile_layers: bool = True
    """Whether captured layers are compiled."""

    def __post_init__(self) -> None:
        check_cache("NativeOptions", self.kv_cache_dtype, self.offload_kvcache)
        size: Any = self.kv_cache_bytes
        if size is not None and not (isinstance(size, int) and not isinstance(size, bool) and size >= 1):
            raise ValueError(
                f"NativeOptions: kv_cache_bytes is {size!r}; it must be an integer of at least 1, such as 2 * 2**30 "
                "for 2 GiB, or None for what is free."
            )
        for name in ("keep_kvcache", "cuda_graphs", "compile_layers"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"NativeOptions: {name} is {getattr(self, name)!r}; it must be True or False.")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> NativeOptions:
        """Take them from a mapping, such as ``Actor(engine_options=...)``.

        Raises:
            ValueError: There is no such option, or a value is out of its range.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"NativeOptions has no {', '.join(unknown)}; it has {', '.join(known)}.")
        return cls(**options)
