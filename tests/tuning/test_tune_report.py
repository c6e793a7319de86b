"""The table of `tune`, and distributions by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tuning_configs import make_run, record

from lightning_verl.tuning.search import Outcome, Row
from lightning_verl.tuning.tune_report import distance, head, line, shift, summary


def test_a_row_has_figures_where_it_ran() -> None:
    verdict = "kept: +59% tokens a second"
    row = line(Row("micro-batch", "628 tokens", verdict, record(0.5, peaks={"process": 3 * 2**29})))
    assert " ".join(row.split()) == f"micro-batch 628 tokens 200 0.50 s 1.50 GiB {verdict}"
    missing = line(Row("mesh", "data 1 x tensor 2", "not tried: planned 9 GiB"))
    assert " ".join(missing.split()) == "mesh data 1 x tensor 2 not tried: planned 9 GiB"
    assert head().index("verdict") == row.index("kept:") == missing.index("not tried")


def test_distributions_by_hand() -> None:
    # Of 0, 0, 1, 1 half are at most 0; of 0, 1, 1, 1 a quarter.
    assert distance([0, 0, 1, 1], [0, 1, 1, 1]) == 0.25
    assert distance([0, 1], [0, 1]) == 0.0
    assert distance([0, 0], [1, 1]) == 1.0
    assert shift([0, 0, 1, 1], [0, 1, 1, 1]) == -0.25


def test_the_summary_compares_with_the_best_before(tmp_path: Path) -> None:
    first = record(2.0, bandwidth=2e9, scores=[0.0, 1.0, 1.0, 1.0], peaks={"process": 2**30})
    faster = replace(first, seconds=[1.0], bandwidth=4e9)
    rows = [
        Row("start", "as given", "", first, kept=True),
        Row("mesh", "data 2", "", faster, kept=True),
        Row(
            "kv-offload", "offload_kvcache", "", replace(first, bandwidth=3e9, metrics={"cache/swapped_bytes": 2.0**29})
        ),
        Row("lora", "r 16", "", replace(first, scores=[0.0, 0.0, 1.0, 1.0])),
    ]
    assert summary(Outcome(make_run(tmp_path), faster, rows)).splitlines() == [
        "100 tokens a second and rank, 2.00 x the 50 of the config as given; peak 1.00 GiB for 1.00",
        "collective bandwidth behind the rollout: 4.00 GB/s without the offload of keys and values, 3.00 with it, "
        "which moved 0.50 GiB a step",
        "rewards, all weights: mean 0.750, deviation 0.433, quantiles 10% 0.000, 50% 1.000, 90% 1.000",
        "rewards, LoRA: mean 0.500, deviation 0.500, quantiles 10% 0.000, 50% 1.000, 90% 1.000",
        "rewards, shift under LoRA: mean -0.250, largest distance of the distributions 0.250",
    ]


def test_what_could_not_be_measured_is_said(tmp_path: Path) -> None:
    full = record(problem="out of memory", out_of_memory=True)
    best = record(1.0)
    rows = [
        Row("start", "as given", "", full),
        Row("mesh", "data 2", "", best, kept=True),
        Row("kv-offload", "offload_kvcache", "", best),
        Row("lora", "r 16", "", full),
    ]
    assert summary(Outcome(make_run(tmp_path), best, rows)).splitlines() == [
        "100 tokens a second and rank; the config as given did not fit",
        "collective bandwidth behind the rollout: nothing to measure on one rank",
    ]
