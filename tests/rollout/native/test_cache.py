"""The cache moves blocks bit by bit, whatever they are kept as."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_verl.rollout.native.cache import CacheShape, KVCache, as_bytes, free_bytes

SHAPE = CacheShape(layers=3, heads=2, head_dim=5, dtype=torch.float32)
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def cache_of(dtype: torch.dtype, host_blocks: int = 0) -> KVCache:
    """Seven blocks full of random bits, NaN among them."""
    cache = KVCache(SHAPE, 7, 4, dtype, torch.device("cpu"), host_blocks)
    generator = torch.Generator().manual_seed(0)
    cache.data.view(torch.uint8).random_(0, 256, generator=generator)
    return cache


def bits(data: Tensor) -> Tensor:
    """To compare NaN too; block by block."""
    return data.transpose(0, 2).contiguous().view(torch.uint8)


def test_what_a_block_takes() -> None:
    assert SHAPE.block_bytes(4, torch.float32) == 2 * 3 * 2 * 5 * 4 * 4
    assert SHAPE.block_bytes(4, torch.float8_e4m3fn) == 2 * 3 * 2 * 5 * 4
    for dtype in DTYPES:
        cache = KVCache(SHAPE, 7, 4, dtype, torch.device("cpu"))
        assert cache.data.shape == (3, 2, 7, 2, 4, 5)
        assert cache.block_bytes == SHAPE.block_bytes(4, dtype)
        assert not cache.data.view(torch.uint8).any()  # a padding row may read block 0 before it was written


def test_what_keys_and_values_are_kept_as() -> None:
    half = CacheShape(layers=1, heads=1, head_dim=8, dtype=torch.float16)
    assert [half.stored(kind) for kind in ("auto", "bfloat16", "fp8")] == [
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_touch_their_targets_only(dtype: torch.dtype) -> None:
    cache = cache_of(dtype)
    before = bits(cache.data).clone()
    cache.copy([(2, 5), (2, 6), (4, 1)])
    after = bits(cache.data)
    for block, source in enumerate((0, 4, 2, 3, 4, 2, 2)):
        assert torch.equal(after[block], before[source]), block
    cache.copy([])
    assert torch.equal(bits(cache.data), after)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_read_before_they_write(dtype: torch.dtype) -> None:
    cache = cache_of(dtype)
    before = bits(cache.data).clone()
    cache.copy([(1, 2), (2, 3)])
    assert torch.equal(bits(cache.data)[3], before[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_come_back_from_the_host_as_they_were(dtype: torch.dtype) -> None:
    cache = cache_of(dtype, host_blocks=4)
    before = bits(cache.data).clone()
    cache.swap_out([(1, 3), (4, 1)])
    assert torch.equal(bits(cache.data), before)
    as_bytes(cache.data)[:, :, 1:] = 0
    cache.swap_in([(1, 6), (3, 2)])
    after = bits(cache.data)
    for block, source in ((0, before[0]), (6, before[4]), (2, before[1])):
        assert torch.equal(after[block], source)
    assert not after[[1, 3, 4, 5]].any()
    cache.swap_in([(3, 4)])  # what lies in host memory may be read again
    assert torch.equal(bits(cache.data)[4], before[1])


def test_without_host_blocks_nothing_can_go_there() -> None:
    cache = cache_of(torch.float32)
    before = bits(cache.data).clone()
    cache.swap_out([])
    cache.swap_in([])
    assert torch.equal(bits(cache.data), before)
    assert cache.host_blocks == 0


def test_free_memory_is_some_of_this_machine() -> None:
    assert 2**26 < free_bytes(torch.device("cpu")) < 2**45


def test_a_share_of_the_gpu_bounds_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    share = 1.0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 150)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    device = torch.device("cuda", 0)
    assert free_bytes(device) == 700 + 200 - 150  # 800 more may be reserved, 700 are there
    share = 0.5
    assert free_bytes(device) == 500 - 150
