"""What may be said about the native engine's memory."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_verl.rollout.native import NativeOptions


def test_a_cache_dtype_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int4'; it must be 'auto', 'bfloat16' or 'fp8'"):
        NativeOptions(kv_cache_dtype="int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, True, "2GB", 1.5e6, [1]])
def test_sizes_are_whole_bytes(size: Any) -> None:
    assert NativeOptions(kv_cache_bytes=1).kv_cache_bytes == 1
    with pytest.raises(
        ValueError, match="NativeOptions: kv_cache_bytes is .*; it must be an integer of at least 1"
    ) as e:
        NativeOptions.of({"kv_cache_bytes": size})
    assert repr(size) in str(e.value)


@pytest.mark.parametrize("name", ["offload_kvcache", "keep_kvcache", "cuda_graphs", "compile_layers"])
@pytest.mark.parametrize("value", [None, "no", 1])
def test_switches_are_on_or_off(name: str, value: Any) -> None:
    for switch in (True, False):
        assert getattr(NativeOptions.of({name: switch}), name) is switch
    with pytest.raises(ValueError, match=f"NativeOptions: {name} is {value!r}; it must be True or False"):
        NativeOptions.of({name: value})


def test_an_option_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="NativeOptions has no cache_bytes; it has kv_cache_dtype, kv_cache_bytes, "):
        NativeOptions.of({"cache_bytes": 1})
