"""A tokenizer with one token a character, made in memory: text and ids correspond at a glance."""

from __future__ import annotations

import string
from collections import Counter

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
_SPECIAL = (PAD, BOS, EOS, UNK)

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
"""The default characters; with the 4 special tokens they make 100 ids."""


def char_tokenizer(characters: str = CHARACTERS, *, bos: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a character.

    Ids: 0 ``<pad>``, 1 ``<bos>``, 2 ``<eos>``, 3 ``<unk>``, which stands for any other character, then ``characters``
    from 4 on, in their order. The special tokens are never split when a text contains them.

    Args:
        characters: The characters of the vocabulary, each once.
        bos: Encoding puts ``<bos>`` in front, as Llama does. False: it does not, and there is no ``bos_token``, as with
            Qwen (id 1 stays reserved).

    Raises:
        ValueError: A character occurs twice, or there is none.
    """
    twice = sorted(character for character, count in Counter(characters).items() if count > 1)
    if twice or not characters:
        raise ValueError(
            f"char_tokenizer: characters must hold each character once and at least one, got {characters!r}"
            + (f" with {''.join(twice)!r} more than once." if twice else ".")
        )
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *characters])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = Fuse()
    if bos:
        special = [(BOS, vocabulary[BOS])]
        backend.post_processor = TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS if bos else None,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
