"""Busy share and latencies of collectives, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_verl.tuning.profile import Kernel, Profile, busy_share, kernels_of


def test_busy_is_what_spans_cover() -> None:
    # 0-4 and 2-6 cover 6, 3-5 lies within, 8-10 covers 2 more: 8 of 16
    assert busy_share([(8, 10), (0, 4), (2, 6), (3, 5)], 16.0) == 0.5
    assert busy_share([], 16.0) is None


def test_copies_and_annotations_are_no_kernels() -> None:
    def event(name: str, kind: str = "CUDA", annotation: bool = False) -> Any:
        device = getattr(torch.autograd.DeviceType, kind)
        functions = {"name": name, "device_type": device, "is_user_annotation": annotation}
        functions |= {"start_ns": 10, "duration_ns": 5}
        return SimpleNamespace(**{key: lambda value=value: value for key, value in functions.items()})

    events = [event("gemm"), event("Memcpy DtoD"), event("Memset"), event("launch", "CPU"), event("step", "CUDA", True)]
    kineto = SimpleNamespace(events=lambda: events)
    profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=kineto))
    assert list(kernels_of(profiler)) == [Kernel("gemm", 10, 15)]


def test_latencies_are_those_of_collectives() -> None:
    ms = 10**6
    kernels = [
        Kernel("gemm", 0, 4 * ms),
        Kernel("ncclDevKernel_AllGather_RING_LL(args)", 2 * ms, 6 * ms),
        Kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(args)", 8 * ms, 10 * ms),
    ]
    profile = Profile.of(kernels, seconds=0.016)
    assert profile.busy == 0.5  # 0-6 and 8-10 of 16 ms
    assert profile.collectives == 2
    assert profile.mean_latency == pytest.approx(0.003)  # (4 + 2) / 2
    assert profile.largest_latency == pytest.approx(0.004)
    assert Profile.of(kernels[:1], 0.016) == Profile(0.25, 0, None, None)
    assert Profile.of([], 0.016) == Profile(None, 0, None, None)
