"""Where the tokens of rows lie in one sequence."""

from __future__ import annotations

from lightning_verl.data.packed_rows import PackedRows, Run
from lightning_verl.data.packing import RowSize

SIZES = [RowSize(2, 3, 0), RowSize(2, 0, 0), RowSize(2, 1, 0), RowSize(1, 2, 1)]
"""Three samples of a prompt of two tokens, one of them without a response, and a row alone."""


def test_samples_of_a_prompt_go_on_from_it():
    rows = PackedRows.of(SIZES, width=10)
    # Place:     0  1 | 2  3  4 | 5 | 6  7  8
    # Row 0's prompt, its response, row 2's response, row 3. Row 1 adds nothing.
    assert rows.source.tolist() == [0, 1, 2, 3, 4, 22, 30, 31, 32]
    assert rows.positions.tolist() == [0, 1, 2, 3, 4, 2, 0, 1, 2]
    assert rows.runs == (Run(0, 2), Run(2, 3, 2, 0), Run(5, 1, 2, 0), Run(6, 3))
    assert [run.seen for run in rows.runs] == [2, 5, 3, 3]
    # The prompt's last token (1) predicts the first of rows 0 and 2; row 3's own first token (6) its response's.
    assert rows.predicting.tolist() == [1, 2, 3, 1, 6, 7]
    assert rows.responses.tolist() == [2, 3, 4, 22, 31, 32]
    assert rows.last.tolist() == [4, 1, 5, 8]


def test_rows_with_prompts_of_their_own():
    rows = PackedRows.of(SIZES, width=10, share_prompts=False)
    assert rows.runs == (Run(0, 5), Run(5, 2), Run(7, 3), Run(10, 3))
    assert rows.source.tolist() == [0, 1, 2, 3, 4, 10, 11, 20, 21, 22, 30, 31, 32]
    assert rows.predicting.tolist() == [1, 2, 3, 8, 10, 11]
    assert rows.last.tolist() == [4, 6, 9, 12]


def test_groups_need_not_be_adjacent():
    rows = PackedRows.of([RowSize(1, 1, 7), RowSize(2, 1, 3), RowSize(1, 2, 7)], width=4)
    assert rows.runs == (Run(0, 1), Run(1, 1, 1, 0), Run(2, 2, 1, 0), Run(4, 3))
    assert rows.source.tolist() == [0, 1, 9, 10, 4, 5, 6]
    assert rows.predicting.tolist() == [0, 5, 0, 2]  # row after row, wherever they lie
    assert rows.responses.tolist() == [1, 6, 9, 10]


def test_no_rows_are_one_token_that_belongs_to_none():
    rows = PackedRows.of([], width=1)
    assert (rows.source.tolist(), rows.positions.tolist(), rows.runs) == ([0], [0], (Run(0, 1),))
    assert rows.predicting.numel() == rows.responses.numel() == rows.last.numel() == 0
