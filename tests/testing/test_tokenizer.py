"""The character tokenizer: ids by hand, special tokens, and copies of it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from lightning_verl.testing import char_tokenizer


def test_a_character_is_a_token() -> None:
    tokenizer = char_tokenizer("abc \n")  # ids from 4 on: a 4, b 5, c 6, space 7, newline 8
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2, 9)
    assert tokenizer("cab \n a").input_ids == [1, 6, 4, 5, 7, 8, 7, 4]
    assert tokenizer("cab", add_special_tokens=False).input_ids == [6, 4, 5]
    assert tokenizer("").input_ids == [1]
    assert tokenizer.decode([1, 6, 4, 5, 7, 8, 7, 4, 2, 0], skip_special_tokens=True) == "cab \n a"
    assert tokenizer.decode([1, 6, 2, 0]) == "<bos>c<eos><pad>"


def test_without_bos() -> None:
    tokenizer = char_tokenizer("abc", bos=False)
    assert tokenizer.bos_token_id is None
    assert tokenizer("cab").input_ids == [6, 4, 5]


def test_special_tokens_are_not_split_and_other_characters_are_unknown() -> None:
    tokenizer = char_tokenizer("abc")
    assert tokenizer("a<eos>b<pad>?", add_special_tokens=False).input_ids == [4, 2, 5, 0, 3]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    assert tokenizer("a<think>b", add_special_tokens=False).input_ids == [4, 7, 5]


def test_batches_are_padded() -> None:
    tokenizer = char_tokenizer("abc")
    batch = tokenizer(["a", "abc"], padding=True)
    assert batch.input_ids == [[1, 4, 0, 0], [1, 4, 5, 6]]
    assert batch.attention_mask == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_the_default_characters_make_100_ids_and_survive_the_round_trip() -> None:
    tokenizer = char_tokenizer()
    text = "12 + 30 = 42, isn't it?\nYES!"
    assert len(tokenizer) == 100
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("bos", [True, False])
def test_saved_and_pickled_copies_are_equal(bos: bool, tmp_path: Path) -> None:
    tokenizer = char_tokenizer("abc ", bos=bos)
    tokenizer.save_pretrained(tmp_path)
    for copy in (AutoTokenizer.from_pretrained(tmp_path), pickle.loads(pickle.dumps(tokenizer))):  # noqa: S301
        assert copy("ab <eos>").input_ids == tokenizer("ab <eos>").input_ids
        assert copy.decode([4, 7, 5]) == "a b"
        assert copy.get_vocab() == tokenizer.get_vocab()
        ids = (copy.pad_token_id, copy.bos_token_id, copy.eos_token_id)
        assert ids == (0, 1 if bos else None, 2)


@pytest.mark.parametrize(("characters", "message"), [("aba", "'aba' with 'a' more than once"), ("", "got ''")])
def test_wrong_characters_are_refused(characters: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        char_tokenizer(characters)
