"""When a response ends, apart from any engine."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_verl.rollout.base import FinishReason
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.rollout.stopping import StopRule


class ByteTokenizer:
    """Token ids are bytes of UTF-8."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode(errors="replace")


def end_of(text: str, **params: Any) -> tuple[int, FinishReason | None]:
    """Tokens after which the response ends, one byte a token, and why."""
    rule = StopRule(SamplingParams(**params), [0], ByteTokenizer())
    tokens = list(text.encode())
    for count in range(1, len(tokens) + 1):
        reason = rule.reason(tokens[:count])
        if reason is not None:
            return count, reason
    return len(tokens), None


@pytest.mark.parametrize(
    ("minimum", "end"),
    [
        (0, 3),  # the third token is the stop string
        (2, 3),  # two tokens come before it
        (3, 7),  # complete within the first three, so the next one counts
        (6, 7),
        (7, None),
    ],
)
def test_a_stop_string_counts_once_enough_tokens_came_before(minimum: int, end: int | None) -> None:
    expected = (8, None) if end is None else (end, FinishReason.STOP_STRING)
    assert end_of("abScabSc", min_new_tokens=minimum, stop_strings=("S",)) == expected


def test_a_stop_string_may_begin_within_the_minimum() -> None:
    assert end_of("xEND.", min_new_tokens=3, stop_strings=("END",)) == (4, FinishReason.STOP_STRING)
    assert end_of("xEND.", min_new_tokens=4, stop_strings=("END",)) == (5, None)
    # Overlapping: "aaa" at 1-3 is too early, at 2-4 it is not.
    assert end_of("aaaa", min_new_tokens=3, stop_strings=("aaa",)) == (4, FinishReason.STOP_STRING)


def test_a_character_of_several_tokens_counts_where_its_last_one_comes() -> None:
    # Three bytes: a half character decodes to a replacement character, which is no text yet.
    assert end_of("a\u20ac", min_new_tokens=3, stop_strings=("\u20ac",)) == (4, FinishReason.STOP_STRING)
    assert end_of("a\u20acb", min_new_tokens=4, stop_strings=("\u20ac",)) == (5, None)


def test_any_of_several_stop_strings_ends_a_response() -> None:
    assert end_of("a.b;c", min_new_tokens=2, stop_strings=(".", ";")) == (4, FinishReason.STOP_STRING)


def test_the_length_limit_holds_at_the_minimum() -> None:
    assert end_of("abcdef", min_new_tokens=4, max_new_tokens=4) == (4, FinishReason.LENGTH)


CUTS: list[dict[str, Any]] = [
    {},
    {"stop_token_ids": (98,)},  # b
    {"stop_strings": ("cab",)},
    {"stop_strings": ("ca", "b"), "min_new_tokens": 3},
    {"stop_strings": ("\u20ac",)},
    {"stop_token_ids": (99,), "stop_strings": ("c",)},  # the end token wins
    {"max_new_tokens": 5},
    {"max_new_tokens": 5, "stop_strings": ("bcab",)},
]


@pytest.mark.parametrize("params", CUTS, ids=str)
@pytest.mark.parametrize("text", ["abcabcabc", "aaaaaaaa\u20ac", "a\u20acb\u20ac", "xyz\0ab", "b"])
def test_tokens_drawn_together_are_cut_where_one_at_a_time_would_end(params: dict[str, Any], text: str) -> None:
    rule = StopRule(SamplingParams(**params), [0], ByteTokenizer())
    tokens = list(text.encode())
    expected = end_of(text, **params)
    for burst in range(1, len(tokens) + 2):
        response: list[int] = []
        reason: FinishReason | None = None
        while len(response) < len(tokens) and reason is None:
            drawn = tokens[len(response) : len(response) + burst]
            count, reason = rule.cut(response, drawn)
            assert 1 <= count <= len(drawn)
            response += drawn[:count]
        assert (len(response), reason) == expected


def test_a_cut_changes_neither_list_and_decodes_only_where_it_must() -> None:
    class NoTokenizer:
        def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
            raise AssertionError("there is no stop string to look for")

    rule = StopRule(SamplingParams(max_new_tokens=6), [0], NoTokenizer())
    response, drawn = [1, 2], [3, 0, 4]
    assert rule.cut(response, drawn) == (2, FinishReason.EOS)
    assert (response, drawn) == ([1, 2], [3, 0, 4])
    assert rule.cut([1, 2], [3, 4, 5]) == (3, None)
    assert rule.cut([1, 2], [3, 4, 5, 6]) == (4, FinishReason.LENGTH)
    assert rule.cut([1, 2], [3, 4, 5, 0]) == (4, FinishReason.EOS)  # at the limit, an end token is no truncation
    assert rule.cut([1, 2], [3, 4, 5, 6, 0]) == (4, FinishReason.LENGTH)
