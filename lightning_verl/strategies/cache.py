"""What may be said about the key-value cache of rollouts, to the strategy or to an engine."""

from __future__ import annotations

from typing import Any, Literal, get_args

KVDtype = Literal["auto", "bfloat16", "fp8"]
"""What keys and values are kept as; "auto" is the dtype that the model computes them in."""


def check_cache(owner: str, kv_cache_dtype: Any, offload_kvcache: Any) -> None:
    """Refuse what no cache can be.

    Args:
        owner: The class that was given them, for messages.
        kv_cache_dtype: One of ``KVDtype``.
        offload_kvcache: True or False.

    Raises:
        ValueError: One of them is something else.
    """
    if kv_cache_dtype not in get_args(KVDtype):
        raise ValueError(f"{owner}: kv_cache_dtype is {kv_cache_dtype!r}; it must be 'auto', 'bfloat16' or 'fp8'.")
    if not isinstance(offload_kvcache, bool):
        raise ValueError(f"{owner}: offload_kvcache is {offload_kvcache!r}; it must be True or False.")


def engine_options(kv_cache_dtype: KVDtype, offload_kvcache: bool) -> dict[str, Any]:
    """What of a strategy's choices an engine has to be told: those that are not the defaults."""
    told: dict[str, Any] = {} if kv_cache_dtype == "auto" else {"kv_cache_dtype": kv_cache_dtype}
    return {**told, "offload_kvcache": True} if offload_kvcache else told
