"""The Triton kernels compute what plain torch computes, on the CPU in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)
SCRIPT = Path(__file__).with_name("interpreted_kernels.py")


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """One run of all cases, in a process whose Triton interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert run.returncode == 0, run.stderr
    loaded: dict[str, Any] = json.loads(run.stdout)
    return loaded


def test_attention_equals_that_of_plain_torch(facts: dict[str, Any]) -> None:
    """Blocks that nobody has written are full of NaN, the rest of the last ones too."""
    assert len(facts["attention"]) > 20
    for name, case in facts["attention"].items():
        bound = 2e-3 if name == "float16" else 1e-5
        assert case["difference"] < bound, name
        assert 0.5 < case["largest"] < 10, name
        assert case["shape"], name
    assert facts["strides"] < 1e-5


def test_walks_over_the_blocks_are_split_where_they_should_be(facts: dict[str, Any]) -> None:
    split = {name for name, case in facts["attention"].items() if case["split"]}
    assert {name for name in facts["attention"] if "split" in name} <= split
    assert "decode" not in split


def test_keys_and_values_are_stored_where_plain_torch_puts_them(facts: dict[str, Any]) -> None:
    for name, case in facts["attention"].items():
        assert case["same cache"], name


def test_drawn_tokens_are_those_of_the_sampler(facts: dict[str, Any]) -> None:
    assert len(facts["draw"]) >= 20
    for name, case in facts["draw"].items():
        assert case["equal"], name
        assert case["difference"] < 1e-5, name
        assert case["finite"], name
        assert case["untouched"], name
        assert case["types"] == ["torch.int64", "torch.float32"], name


def test_a_row_of_nan_gives_a_token_and_no_log_prob(facts: dict[str, Any]) -> None:
    assert facts["broken draw"] == {"others": True, "inside": True, "nan": [False, True, False]}


def test_how_a_step_is_divided(facts: dict[str, Any]) -> None:
    lengths, starts, counts, sequences, firsts = facts["tiles"]["both"]
    assert (lengths, starts, counts) == ([20, 17], [0, 18], [18, 1])
    assert (sequences, firsts) == ([0, 0, 1], [0, 16, 0])  # 16 queries a tile
    assert facts["tiles"]["tables"]
    assert facts["tiles"]["queries"] == [16, 1]
    assert facts["tiles"]["decode"] == [[0], [0]]


def test_random_numbers_are_those_of_the_sampler(facts: dict[str, Any]) -> None:
    assert facts["uniforms"] is True


def test_joined_layers_compute_what_each_does(facts: dict[str, Any]) -> None:
    """Sums of numbers of about 1 that are rounded to float16 once: by 2**-11 of up to 4."""
    assert len(facts["linears"]) == 4
    for name, error in facts["linears"].items():
        assert error < 2e-3, name


def test_which_layers_are_joined(facts: dict[str, Any]) -> None:
    assert {name for name, pays in facts["pays"].items() if pays} == {"few rows", "biases"}
    assert len(facts["pays"]) == 8


def test_state_advances_on_the_device(facts: dict[str, Any]) -> None:
    """Last tokens, positions, seeds, places in the response, and lengths, one token after the other."""
    decoding = facts["decoding"]
    assert decoding["tables"] == [[9, 0], [2, 5], [0, 0]]  # a row without a sample writes to block 0
    assert decoding["steps"] == [
        [[5, 6, 0], [4, 1, 0], [7, 8, 0], [2, 1, 0], [5, 2, 1]],
        [[7, 8, 0], [5, 2, 1], [7, 8, 0], [3, 2, 1], [6, 3, 2]],
        [[7, 7, 0], [5, 3, 2], [7, 8, 0], [4, 3, 2], [6, 4, 3]],  # position 5 is the last of 6 tokens
    ]
    assert decoding["tokens"] == [[7, 7, 7], [8, 7, 6]]
    assert decoding["logprobs"] == [[-1.0, -1.0, -1.0], [-2.0, -3.0, -4.0]]
    assert decoding["kept"] == [[7, 6], [5, 4]]
    assert decoding["turn"] == [0]
    seen, later = (
        [[token for token, had in enumerate(row) if had] for row in decoding[key]] for key in ("seen", "seen later")
    )
    assert seen == [[1, 2, 3, 4, 5], [3, 6]]
    assert later == [[1, 2, 3, 4, 5, 7], [3, 6, 7, 8]]


def test_a_smaller_batch_size_waits_until_its_graph_pays(facts: dict[str, Any]) -> None:
    """Four bursts of 16 tokens; a size that is there already is taken at once, and one that is too small never is."""
    assert facts["sizes"] == [256, 256, 256, 256, 256, 64, 64, 64, 64, 64, 64, 384, 64, 256]
