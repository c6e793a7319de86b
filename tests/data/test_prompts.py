"""The data set of prompts: reading, checking, templates, token ids and length limits."""

# ruff: noqa: S105, S106 - tokens of text, not passwords

from __future__ import annotations

import json
import multiprocessing
import threading

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightning_verl.data.prompts import AsyncRolloutDataset

PAD, BOS, EOS = 0, 1, 2


class CharTokenizer:
    """One token a character; "^" is BOS, "$" is EOS. BOS comes from the template, from the call, from both or none."""

    def __init__(self, *, template_bos=False, call_bos=False, call_eos=False):
        self.pad_token_id, self.bos_token_id, self.eos_token_id = PAD, BOS, EOS
        self.bos_token = "^"
        self.template_bos, self.call_bos, self.call_eos = template_bos, call_bos, call_eos

    def __call__(self, texts, add_special_tokens=True):
        if any("!" in text for text in texts):
            raise OverflowError("cannot take !")
        front = [BOS] if self.call_bos and add_special_tokens else []
        back = [EOS] if self.call_eos and add_special_tokens else []
        special = {"^": BOS, "$": EOS}
        ids = [[special.get(letter, ord(letter)) for letter in text if letter != "~"] for text in texts]
        return {"input_ids": [front + row + back for row in ids]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        if messages[0]["role"] == "alien":
            raise LookupError("unknown role alien")
        text = "".join(f"<{message['role'][0]}>{message['content']}" for message in messages)
        return ("^" if self.template_bos else "") + text + ("<a>" if add_generation_prompt else "")


def chars(text):
    return [ord(letter) for letter in text]


def user(text):
    return [{"role": "user", "content": text}]


def prompts_of(*texts):
    return [{"prompt": text} for text in texts]


def dataset(source, tokenizer=None, **settings):
    settings = {"shuffle": False, "epochs": 1, **settings}
    return AsyncRolloutDataset(source, tokenizer=tokenizer or CharTokenizer(), **settings)


def read(data):
    """All rows of one epoch as a batch."""
    with data.loader(len(data)) as loader:
        return next(loader)


# --- token ids --------------------------------------------------------------------------------------------------------


def test_batch_is_right_padded_int64():
    batch = read(dataset(prompts_of("abc", "d")))
    assert batch.ids.tolist() == [[97, 98, 99], [100, PAD, PAD]]
    assert batch.ids.dtype == batch.lengths.dtype == batch.indices.dtype == torch.int64
    assert batch.lengths.tolist() == [3, 1]
    assert batch.indices.tolist() == [0, 1]
    assert batch.texts == ["abc", "d"]


@pytest.mark.parametrize("template_bos", [False, True])
@pytest.mark.parametrize("call_bos", [False, True])
def test_templated_prompt_has_one_bos_where_the_tokenizer_uses_one(template_bos, call_bos):
    data = dataset([{"prompt": user("hi")}], CharTokenizer(template_bos=template_bos, call_bos=call_bos))
    batch = read(data)
    bos = [BOS] if template_bos or call_bos else []
    assert batch.token_lists() == [bos + chars("<u>hi<a>")]
    assert batch.texts == [("^" if template_bos else "") + "<u>hi<a>"]


@pytest.mark.parametrize("first", ["hi", "^hi", user("hi")])
def test_raw_prompt_has_one_bos_whatever_row_comes_first(first):
    tokenizer = CharTokenizer(template_bos=True, call_bos=True)
    batch = read(dataset(prompts_of(first, "ab", "^ab", user("ab")), tokenizer))
    assert batch.token_lists()[1:] == [[BOS, *chars("ab")], [BOS, *chars("ab")], [BOS, *chars("<u>ab<a>")]]


class CarefulTokenizer(CharTokenizer):
    """Adds no BOS to a text that begins with one."""

    def __call__(self, texts, add_special_tokens=True):
        called = [
            super(CarefulTokenizer, self).__call__([text], add_special_tokens and text[:1] != "^") for text in texts
        ]
        return {"input_ids": [result["input_ids"][0] for result in called]}


def test_careful_tokenizer_is_understood():
    batch = read(dataset(prompts_of("^ab", "ab"), CarefulTokenizer(call_bos=True)))
    assert batch.token_lists() == [[BOS, *chars("ab")]] * 2


def test_raw_prompt_gets_no_bos_from_a_tokenizer_without_one():
    assert read(dataset(prompts_of("ab"))).token_lists() == [chars("ab")]


def test_eos_that_the_tokenizer_appends_is_left_out():
    tokenizer = CharTokenizer(call_bos=True, call_eos=True)
    assert read(dataset(prompts_of("ab", user("ab")), tokenizer)).token_lists() == [
        [BOS, *chars("ab")],
        [BOS, *chars("<u>ab<a>")],
    ]


def fast_tokenizer():
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{{ bos_token }} {% for message in messages %}{{ message['content'] }} {% endfor %}"
    return tokenizer


@pytest.mark.parametrize("num_workers", [0, 2])
def test_transformers_tokenizer(num_workers):
    tokenizer = fast_tokenizer()
    data = dataset(prompts_of(user("a b"), "b a", "<s> b"), tokenizer, num_workers=num_workers)
    assert read(data).token_lists() == [[1, 4, 5], [1, 5, 4], [1, 5]]
    # templates and calls of the tokenizer itself give the same ids
    assert tokenizer.apply_chat_template(user("a b"))["input_ids"] == [1, 4, 5]
    assert tokenizer("b a")["input_ids"] == [1, 5, 4]


def test_missing_chat_template_is_an_error_that_says_so():
    tokenizer = fast_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"the chat template failed on row 1 .*chat_template"):
        dataset([{"prompt": user("a")}], tokenizer)


def test_other_fields_pass_through():
    answer = object()
    batch = read(dataset([{"prompt": "a", "answer": answer, "level": 3}, {"prompt": "b"}]))
    assert batch.fields == [{"answer": answer, "level": 3}, {}]
    assert batch.fields[0]["answer"] is answer


def test_prompt_field_is_configurable():
    batch = read(dataset([{"question": "a", "prompt": "kept"}], prompt_field="question"))
    assert batch.texts == ["a"]
    assert batch.fields == [{"prompt": "kept"}]


# --- sources ----------------------------------------------------------------------------------------------------------


class Indexed:
    """What a Hugging Face dataset looks like; counts the rows that are fetched by number."""

    def __init__(self, rows):
        self.rows, self.fetched = rows, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.fetched += 1
        return self.rows[index]

    def __iter__(self):
        return iter(self.rows)


def test_sources_of_all_kinds_agree(tmp_path):
    rows = [{"prompt": "a", "n": 1}, {"prompt": user("b"), "n": 2}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for source in (path, str(path), rows, tuple(rows), iter(rows), Indexed(rows)):
        batch = read(dataset(source))
        assert batch.texts == ["a", "<u>b<a>"]
        assert batch.fields == [{"n": 1}, {"n": 2}]


def test_rows_of_an_indexed_source_are_left_in_it():
    source = Indexed(prompts_of("a", None, "c"))
    with pytest.warns(UserWarning, match="skipped 1 bad rows"):
        data = dataset(source, on_bad_row="skip")
    assert source.fetched == 1  # the first prompt, which the encoder learns its special tokens from
    assert read(data).texts == ["a", "c"]


def test_source_without_iter_is_read_up_to_its_length():
    class Endless:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return {"prompt": "ab"[index % 2]}

    assert read(dataset(Endless())).texts == ["a", "b"]


def test_source_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file at 'openai/gsm8k'.*JSONL"):
        dataset("openai/gsm8k")
    with pytest.raises(TypeError, match=r"source is a dict with keys \['train'\].*source\['train'\]"):
        dataset({"train": prompts_of("a")})
    with pytest.raises(TypeError, match="source is a int"):
        dataset(3)
    with pytest.raises(ValueError, match="no usable prompt: it has no rows"):
        dataset([])
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"\n\n")
    with pytest.raises(ValueError, match="no usable prompt: it has no rows"):
        dataset(empty)


# --- bad rows ---------------------------------------------------------------------------------------------------------

BROKEN = (
    b'{"prompt": "a"}\n\n{"prompt": "a"\n{"prompt": "\xe6"}\n{"text": "no prompt"}\n{"prompt": null}\n{"prompt": "b"}'
)


@pytest.fixture
def broken(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_bytes(BROKEN)
    return path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_strict_names_file_line_and_reason_in_the_constructor(broken, num_workers):
    with pytest.raises(
        ValueError, match=r"broken\.jsonl, line 3: not valid JSON: Expecting ',' delimiter at character"
    ):
        dataset(broken, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skip_leaves_bad_lines_out_and_counts_them(broken, num_workers):
    with pytest.warns(UserWarning, match=r"skipped 4 bad rows, the first at .*broken\.jsonl, line 3"):
        data = dataset(broken, on_bad_row="skip", num_workers=num_workers)
    assert (len(data), data.skipped) == (2, 4)
    assert read(data).texts == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "\xe6"}', "line 2: not UTF-8: byte 0xe6 at place 13"),
        (b'{"text": "x", "id": 3}', r"line 2: the key 'prompt' is missing, the row has \['id', 'text'\]"),
        (b'{"prompt": null}', "line 2: 'prompt' is null"),
        (b'{"prompt": 5}', "line 2: 'prompt' must be a string or a list of messages, not int"),
        (b'{"prompt": ""}', "line 2: 'prompt' is empty"),
        (b'{"prompt": []}', "line 2: 'prompt' is empty"),
        (b'{"prompt": ["a"]}', "line 2: a message must be a mapping with 'role' and 'content', not 'a'"),
        (b'{"prompt": [{"content": "a"}]}', "line 2: a message must be a mapping with 'role'"),
        (b'{"prompt": [{"role": "user"}]}', "line 2: the content of a 'user' message must be a text, not None"),
        (b'{"prompt": "\\ud800"}', "line 2: 'prompt' is not valid Unicode text: surrogates not allowed"),
        (b'["prompt"]', r"line 2: a row must be a mapping \(a JSON object\), not a list"),
        (b"9" * 5000, "line 2: not readable JSON: Exceeds the limit"),
        (b"\xff\xfe{\x00", "line 2: not UTF-8: byte 0xff at place 1"),
    ],
)
def test_reasons_of_bad_lines(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=reason):
        dataset(path)


def test_rows_in_memory_are_named_by_number():
    with pytest.raises(ValueError, match=r"bad row at row 2 \(counted from 1\): 'prompt' is empty"):
        dataset(prompts_of("a", ""))
    with pytest.raises(ValueError, match=r"bad row at row 1 .*a row must be a mapping"):
        dataset(["a"])


def test_nothing_but_bad_rows_is_an_error():
    with pytest.raises(ValueError, match="no usable prompt: all 2 rows are bad, the first at row 1"):
        dataset(prompts_of("", None), on_bad_row="skip")


def test_byte_order_mark_crlf_and_blank_lines_are_tolerated(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b\xe2\x80\xa8"}\r\n\r\n  \n')
    data = dataset(path)
    assert data.skipped == 0
    assert read(data).texts == ["a", "b\u2028"]


# --- length limits ----------------------------------------------------------------------------------------------------

LENGTHS_3_4_5_9 = prompts_of("abc", "abcd", "abcde", "abcdefghi")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_names_the_row_and_both_lengths(num_workers):
    message = r"row 3 \(counted from 1\) is too long, 5 > 4 tokens \(2 of 4 prompts .* the longest 9\)"
    with pytest.raises(ValueError, match=message):
        dataset(LENGTHS_3_4_5_9, max_prompt_length=4, num_workers=num_workers)


def test_error_names_the_line_of_a_file(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "abcde"}\n')
    with pytest.raises(ValueError, match=r"long\.jsonl, line 3 is too long, 5 > 4"):
        dataset(path, max_prompt_length=4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_filter_drops_counts_and_reports(num_workers):
    with pytest.warns(UserWarning, match="2 of 4 prompts are longer than max_prompt_length=4 tokens, the longest 9"):
        data = dataset(LENGTHS_3_4_5_9, max_prompt_length=4, overlong="filter", num_workers=num_workers)
    assert (len(data), data.filtered) == (2, 2)
    assert read(data).texts == ["abc", "abcd"]


def test_filter_keeps_fields_and_places_with_their_rows():
    rows = [
        {"prompt": "abcdef", "n": 1},
        {"prompt": "a", "n": 2},
        {"prompt": "abcdef", "n": 3},
        {"prompt": "b", "n": 4},
    ]
    with pytest.warns(UserWarning, match="left out 2 rows"):
        data = dataset(rows, max_prompt_length=4, overlong="filter")
    batch = read(data)
    assert (batch.token_lists(), batch.fields) == ([chars("a"), chars("b")], [{"n": 2}, {"n": 4}])


def test_filter_that_leaves_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"leaves no prompt: 4 of 4 prompts .* the shortest 3"):
        dataset(LENGTHS_3_4_5_9, max_prompt_length=2, overlong="filter")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("side", "kept"), [("left", ["abc", "abcd", "bcde", "fghi"]), ("right", ["abc", "abcd", "abcd", "abcd"])]
)
def test_left_and_right_cut(side, kept, num_workers):
    batch = read(dataset(LENGTHS_3_4_5_9, max_prompt_length=4, overlong=side, num_workers=num_workers))
    assert batch.token_lists() == [chars(text) for text in kept]
    assert batch.texts[3] == "abcdefghi"


def test_a_cut_keeps_bos():
    tokenizer = CharTokenizer(call_bos=True, template_bos=True)
    rows = prompts_of("abcde", user("x"))  # templated: ^<u>x<a>
    left = read(dataset(rows, tokenizer, max_prompt_length=4, overlong="left"))
    assert left.token_lists() == [[BOS, *chars("cde")], [BOS, *chars("<a>")]]
    right = read(dataset(rows, tokenizer, max_prompt_length=4, overlong="right"))
    assert right.token_lists() == [[BOS, *chars("abc")], [BOS, *chars("<u>")]]
    assert read(dataset(rows, tokenizer, max_prompt_length=1, overlong="left")).token_lists() == [
        chars("e"),
        chars(">"),
    ]


def test_limit_counts_bos_and_the_template():
    dataset(prompts_of("abc"), CharTokenizer(call_bos=True), max_prompt_length=4)
    with pytest.raises(ValueError, match="5 > 4"):
        dataset(prompts_of("abcd"), CharTokenizer(call_bos=True), max_prompt_length=4)
    with pytest.raises(ValueError, match="7 > 4"):  # <u>x<a>
        dataset([{"prompt": user("x")}], max_prompt_length=4)


def test_tokenising_up_front_spans_several_blocks(monkeypatch):
    monkeypatch.setattr("lightning_verl.data.prompts._ENCODE_BLOCK", 3)
    texts = [letter * 2 for letter in "abcdefgh"]
    assert read(dataset(prompts_of(*texts), max_prompt_length=4)).texts == texts


# --- failing tokenizers and settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_tokenizer_errors_up_front_name_the_row_and_leave_no_process(num_workers):
    threads = threading.active_count()
    with pytest.raises(ValueError, match=r"tokenising row 3 .* failed: OverflowError: cannot take !"):
        dataset(prompts_of("a", "b", "c!", "d"), max_prompt_length=4, num_workers=num_workers)
    assert multiprocessing.active_children() == []
    assert threading.active_count() == threads


def test_template_errors_name_the_row():
    rows = prompts_of("a", [{"role": "alien", "content": "x"}])
    with pytest.raises(ValueError, match=r"template failed on row 2 .*: LookupError: unknown role alien"):
        dataset(rows, max_prompt_length=9)


@pytest.mark.parametrize(("text", "message"), [("!", "tokenising row 1 .* failed"), ("~", "row 1 .* has no tokens")])
def test_first_prompt_is_tried_in_the_constructor(text, message):
    with pytest.raises(ValueError, match=message):
        dataset(prompts_of(text, "a"))


def test_prompt_without_tokens_is_an_error():
    with pytest.raises(ValueError, match=r"the prompt at row 2 .* has no tokens"):
        dataset(prompts_of("a", "~"), max_prompt_length=9)


@pytest.mark.parametrize(
    ("name", "message"),
    [("pad_token_id", "no pad token; set tokenizer.pad_token = tokenizer.eos_token"), ("eos_token_id", "no EOS token")],
)
def test_tokenizer_must_have_pad_and_eos(name, message):
    tokenizer = CharTokenizer()
    setattr(tokenizer, name, None)
    with pytest.raises(ValueError, match=message):
        dataset(prompts_of("a"), tokenizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlong": "drop"}, "overlong='drop' is unknown; choose one of error, filter, left, right"),
        ({"on_bad_row": "warn"}, "on_bad_row='warn' is unknown; choose one of error, skip"),
        ({"max_prompt_length": 0}, "max_prompt_length=0, but it must be at least 1"),
        ({"epochs": 0}, "epochs=0, but it must be at least 1"),
        ({"prefetch_factor": -1}, "prefetch_factor=-1, but it must be at least 0"),
        ({"num_workers": -1}, "num_workers=-1, but it must be at least 0"),
        ({"pin_memory": True}, "pin_memory=True is refused: the loader pins its batches by itself"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        dataset(prompts_of("a"), **settings)


def test_tokenizer_of_the_user_is_not_shared():
    tokenizer = CharTokenizer(call_bos=True)
    data = dataset(prompts_of("a"), tokenizer)
    tokenizer.bos_token = "changed"
    assert data._encoder.tokenizer.bos_token == "^"
