"""Bytes of collectives, by hand and as the recorder sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_verl.models.compat import all_gather_flat
from lightning_verl.testing import run_ranks
from lightning_verl.tuning.traffic import TrafficMeter, collective_bandwidth, received_bytes


def entry(name: str, given: list[int], got: list[int], dtype: str = "Float") -> dict[str, Any]:
    return {
        "profiling_name": name,
        "input_sizes": [given],
        "input_dtypes": [dtype],
        "output_sizes": [got],
        "output_dtypes": [dtype],
    }


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        # Four ranks. 10 x 3 floats of each are gathered: 3 x 120 bytes come from the others.
        (entry("nccl:_all_gather_base", [10, 3], [40, 3]), 360),
        (entry("nccl:_reduce_scatter_base", [40, 3], [10, 3], "BFloat16"), 180),
        (entry("gloo:all_reduce", [40, 3], [40, 3]), 720),
        (entry("nccl:all_to_all", [40], [40], "Byte"), 30),
        (entry("nccl:broadcast", [5], [5], "Long"), 40),
        (entry("nccl:recv 0<-1", [7], [7], "Half"), 14),
        (entry("nccl:send 0->1", [7], [7], "Half"), 0),
        (entry("nccl:coalesced", [], []) | {"input_sizes": [], "output_sizes": []}, 0),
    ],
)
def test_bytes_by_hand(of: dict[str, Any], expected: int) -> None:
    assert received_bytes(of, ranks=4) == expected


def count() -> list[int]:
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    meter = TrafficMeter()
    meter.read()
    floats = torch.ones(100)
    dist.all_reduce(floats)  # 2 x 400 x 3 / 4 = 600
    counts = [meter.read()]
    if dist.get_rank() < 2:
        all_gather_flat(torch.empty(200), floats, pair)  # 400 of 800
    return [*counts, meter.read(), meter.read()]


def test_the_meter_reads_what_was_issued_since() -> None:
    found = run_ranks(count, 4)
    assert found == [[600, 400, 0], [600, 400, 0], [600, 0, 0], [600, 0, 0]]


def test_what_the_recorder_has_lost_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [
        entry("gloo:broadcast", [5], [5]) | {"record_id": number, "process_group": ["0", ""]} for number in range(4)
    ]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr("lightning_verl.strategies.recorder.recorded", lambda nccl: held)
    meter = TrafficMeter()
    assert meter.read() == 4 * 20
    assert meter.read() == 0
    held[:] = [{**held[0], "record_id": number} for number in (5, 6)]  # 4 is gone
    assert meter.read() is None
    held += [{**held[0], "record_id": 7}]
    assert meter.read() == 20


def measure() -> float | None:
    dist.init_process_group("gloo")
    return collective_bandwidth(torch.device("cpu"))


def test_bandwidth_needs_two_ranks() -> None:
    assert collective_bandwidth(torch.device("cpu")) is None
    assert TrafficMeter().read() == 0
    found = run_ranks(measure, 2)
    assert all(rate is not None and 1e6 < rate < 1e12 for rate in found)
