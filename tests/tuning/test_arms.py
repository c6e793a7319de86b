"""The rows of `tunings`: what is off and on in each."""

from __future__ import annotations

import pytest

from lightning_verl.config import EngineConfig
from lightning_verl.strategies.hybrid import HybridStrategy
from lightning_verl.tuning.arms import LINEAR_OUTPUTS, TUNINGS, Arm, Tuning, Work, arms_of, key_of
from lightning_verl.tuning.candidates import LORA


def row(name: str) -> Tuning:
    return next(tuning for tuning in TUNINGS if tuning.name == name)


def test_the_rows() -> None:
    assert [tuning.name for tuning in TUNINGS] == [
        "layout",
        "checkpointing",
        "checkpointing-list",
        "kv-offload",
        "lora",
        "reward",
        "ratio",
        "groups",
        "prefetch",
        "all",
    ]
    assert {tuning.name for tuning in TUNINGS if tuning.needs_ranks == 2} == {"layout", "reward", "groups"}


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("checkpointing", Arm(2, checkpointing="selective")),
        ("checkpointing-list", Arm(2, checkpointing=LINEAR_OUTPUTS)),
        ("lora", Arm(2, lora=LORA)),
        ("reward", Arm(2, reward_apart=True)),
        ("ratio", Arm(2, ratio=4)),
        ("groups", Arm(2, isolated=True)),
        ("prefetch", Arm(2, prefetch=True)),
    ],
)
def test_a_row_changes_one_thing(name: str, on: Arm) -> None:
    assert arms_of(row(name), 2, Work()) == (Arm(2), on)


def test_half_of_the_cache_goes_to_the_host() -> None:
    # 4 of 8 prompts: 4 x 128 + 4 x 8 x 256 = 8,704 tokens; 2 x 28 layers x 2 heads x 128 x 2 bytes = 28,672 a token
    assert Work().cache_bytes(2) == 8_704 * 28_672
    off, on = arms_of(row("kv-offload"), 2, Work())
    assert (off, on.engine) == (Arm(2), {"offload_kvcache": True, "kv_cache_bytes": 8_704 * 28_672 // 2})
    EngineConfig("native", on.engine)


def test_all_off_is_the_layout_off_and_all_on_is_everything_else() -> None:
    off, on = arms_of(row("all"), 2, Work())
    assert off == arms_of(row("layout"), 2, Work())[0] == Arm(2, tensor=2)
    assert arms_of(row("layout"), 2, Work())[1] == Arm(2)
    assert on == Arm(2, 1, "selective", {"offload_kvcache": True}, LORA, False, 4, True, True)
    assert arms_of(row("all"), 1, Work())[0] == Arm()
    assert arms_of(row("all"), 1, Work())[1].isolated is False


def test_layouts_are_those_of_the_strategy() -> None:
    assert (Arm(4, tensor=2).mesh, Arm(4, tensor=2).parallelism) == ((2, 2, 1, 1), {})
    apart = Arm(3, reward_apart=True)
    assert (apart.mesh, apart.parallelism) == ((2, 1, 1, 1), {"reward": {"dp": 1, "ranks": [2]}})
    strategy = HybridStrategy(apart.mesh, apart.parallelism)
    strategy._resolve(3)
    assert strategy.layout("reward").ranks == (2,)
    assert strategy.layout("actor").ranks == (0, 1)


def test_arms_have_names() -> None:
    assert key_of(Arm()) == "plain"
    assert key_of(Arm(2, ratio=4)) == "ranks=2, ratio=4"
    keys = [key_of(arm) for tuning in TUNINGS for arm in arms_of(tuning, 2, Work())]
    assert len(set(keys)) == 11  # layout off = all off; layout on = off of the others
