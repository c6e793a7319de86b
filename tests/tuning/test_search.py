"""The search, with made-up trials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tuning_configs import make_run, record

from lightning_verl.config import TrainConfig
from lightning_verl.tuning.candidates import Candidate, Knob, Start
from lightning_verl.tuning.record import Record
from lightning_verl.tuning.search import Outcome, Row, TuneError, judge, search

FULL = record(problem="out of memory: 2 GiB", out_of_memory=True)


@pytest.mark.parametrize(
    ("found", "kept", "verdict"),
    [
        (record(1.0), True, "kept: +100% tokens a second"),  # 100 tokens a second for 50
        (record(1.96), False, "+2% tokens a second"),  # below the margin
        (record(1.9), False, "+5% tokens a second"),  # 52.6, a step of the best one had 55.6
        (record(4.0), False, "-50% tokens a second"),
        (FULL, False, "out of memory: 2 GiB"),
    ],
)
def test_a_change_must_be_measurably_faster(found: Record, kept: bool, verdict: str) -> None:
    assert judge(found, record(2.0, 1.8, 2.2)) == (kept, verdict)


def test_what_runs_is_better_than_what_does_not() -> None:
    assert judge(record(9.0), FULL) == (True, "kept: it runs, what came before did not")


def with_tokens(config: TrainConfig, tokens: int) -> TrainConfig:
    return replace(config, batch=replace(config.batch, max_tokens_per_micro_batch=tokens))


def tokens_of(config: TrainConfig) -> int | None:
    return config.batch.max_tokens_per_micro_batch


def knob(*tokens: int, name: str = "micro-batch") -> Knob:
    def candidates(start: Start) -> list[Candidate]:
        return [Candidate(str(number), with_tokens(start.config, number)) for number in tokens]

    return Knob(name, False, candidates)  # type: ignore[arg-type]


def run_search(
    config: TrainConfig, trials: Callable[[TrainConfig], Record], *knobs: Knob
) -> tuple[Outcome, list[Row], list[int | None]]:
    rows: list[Row] = []
    ran: list[int | None] = []

    def run(config: TrainConfig) -> Record:
        ran.append(tokens_of(config))
        return trials(config)

    return search(config, run, rows.append, knobs), rows, ran


def test_each_setting_begins_with_the_best_before_it(tmp_path: Path) -> None:
    seconds = {None: 8.0, 100: 4.0, 200: 5.0, 300: 3.0}
    outcome, rows, ran = run_search(
        make_run(tmp_path), lambda config: record(seconds[tokens_of(config)]), knob(100, 200), knob(300, name="other")
    )
    # What a faster trial is compared with runs once more, to be of the same minute.
    assert ran == [None, 100, None, 200, 300, 100]
    assert [(row.knob, row.name, row.kept) for row in rows] == [
        ("start", "as given", True),
        ("micro-batch", "100", True),
        ("micro-batch", "200", False),
        ("other", "300", True),
    ]
    assert tokens_of(outcome.config) == 300
    assert outcome.best == record(3.0)
    assert outcome.rows == rows


def test_a_slow_minute_makes_no_winner(tmp_path: Path) -> None:
    starts = iter([record(8.0), record(4.0)])
    outcome, rows, _ = run_search(
        make_run(tmp_path), lambda config: record(4.0) if tokens_of(config) else next(starts), knob(100)
    )
    assert rows[1].verdict == "+0% tokens a second, with what came before measured again"
    assert not rows[1].kept
    assert (tokens_of(outcome.config), outcome.best) == (None, record(4.0))


def test_memory_is_found_out_where_the_config_does_not_fit(tmp_path: Path) -> None:
    outcome, rows, ran = run_search(
        make_run(tmp_path), lambda config: record(5.0) if tokens_of(config) == 100 else FULL, knob(200, 100)
    )
    assert ran == [None, 200, 100]
    assert [row.verdict for row in rows] == ["out of memory: 2 GiB"] * 2 + ["kept: it runs, what came before did not"]
    assert tokens_of(outcome.config) == 100
    with pytest.raises(TuneError, match="no config that was tried fits: out of memory"):
        run_search(make_run(tmp_path), lambda config: FULL, knob(200))


def test_a_micro_batch_that_did_not_fit_is_offered_again(tmp_path: Path) -> None:
    seen: list[int | None] = []
    later = Knob("later", False, lambda start: seen.append(start.wanted_tokens) or iter(()))  # type: ignore[func-returns-value, arg-type, return-value]
    run_search(make_run(tmp_path), lambda config: FULL if tokens_of(config) else record(5.0), knob(400, 300), later)
    assert seen == [300]


def test_a_config_that_fails_otherwise_is_not_tuned(tmp_path: Path) -> None:
    failed = record(problem="ValueError: no such column")
    with pytest.raises(TuneError, match="does not run as it stands: ValueError: no such column"):
        run_search(make_run(tmp_path), lambda config: failed)
    never_began = Record(problem="out of memory: at the start", out_of_memory=True)  # where, and on how many ranks?
    with pytest.raises(TuneError, match="does not run as it stands"):
        run_search(make_run(tmp_path), lambda config: never_began)


def test_what_the_plan_refuses_is_not_run(tmp_path: Path) -> None:
    small = replace(record(5.0), memory_bytes=2**16)
    _, rows, ran = run_search(make_run(tmp_path), lambda config: small, knob(100))
    assert ran == [None]
    assert rows[1].verdict.startswith("not tried: planned 0.00 GiB in ")
    meshes = Knob(
        "mesh",
        False,
        lambda start: iter(
            [Candidate("4", replace(start.config, strategy=replace(start.config.strategy, mesh_shape=(4, 1, 1, 1))))]
        ),
    )
    _, rows, ran = run_search(make_run(tmp_path), lambda config: record(5.0), meshes)
    assert ran == [None]
    assert rows[1].verdict.startswith("not tried: ")
    assert "4 x 1 x 1 x 1" in rows[1].verdict
