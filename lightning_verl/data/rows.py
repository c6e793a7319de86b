"""The rows of a prompt data set: reading, checking and naming them, and turning their prompts into token ids."""

from __future__ import annotations

import codecs
import copy
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lightning.fabric.utilities import rank_zero_warn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A text, or chat messages ``{"role": ..., "content": ...}``."""


class _BadRowError(ValueError):
    """Why a row cannot be used; `PromptRows` adds where it stands."""


class PromptRows:
    """The usable rows of a source, each checked once, here, in the process that makes the object.

    JSONL files are read whole. Blank lines are no rows and are not counted as bad; a UTF-8 byte order mark is ignored.
    Rows of an object with ``__len__`` and ``__getitem__`` (a list, a Hugging Face dataset) stay in it and are fetched
    by their number when they are needed; other iterables are read to their end, so they must have one.

    Args:
        source: Path of a JSONL file, an iterable of mappings, or an object with ``__len__`` and ``__getitem__``.
        prompt_field: The key of the prompt.
        on_bad_row: "error" raises at the first bad row, "skip" leaves bad rows out and warns with their number.

    Raises:
        FileNotFoundError: There is no file at the path.
        TypeError: The source is none of the three kinds.
        ValueError: A row is bad and ``on_bad_row="error"``, or no usable row is left.
    """

    def __init__(self, source: object, prompt_field: str, on_bad_row: Literal["error", "skip"]) -> None:
        self.prompt_field = prompt_field
        self.skipped = 0
        """Bad rows that were left out."""
        self._prefix = "row "
        self._suffix = " (counted from 1)"
        self._numbers: list[int] = []
        if isinstance(source, str | Path):
            self._prefix, self._suffix = f"{source}, line ", ""
            self._store: Any = list(self._usable(_numbered_lines(Path(source)), _parse_line, on_bad_row))
            self._places: Sequence[int] = range(len(self._store))
        elif isinstance(source, Mapping):
            raise TypeError(
                f"AsyncRolloutDataset: source is a {type(source).__name__} with keys {list(source)[:5]}, not rows; "
                "pass a list of mappings, or one split of a dataset, such as source['train']."
            )
        elif hasattr(source, "__len__") and hasattr(source, "__getitem__"):
            self._store = source
            numbered = enumerate(islice(iter(self._store), len(self._store)), 1)
            self._places = [self._numbers[-1] - 1 for _ in self._usable(numbered, _as_mapping, on_bad_row)]
        elif isinstance(source, Iterable):
            self._store = list(self._usable(enumerate(source, 1), _as_mapping, on_bad_row))
            self._places = range(len(self._store))
        else:
            raise TypeError(
                f"AsyncRolloutDataset: source is a {type(source).__name__}; pass the path of a JSONL file, an iterable "
                "of mappings, or an object with __len__ and __getitem__."
            )

    def __len__(self) -> int:
        return len(self._numbers)

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row: a non-empty text, or at least one message."""
        prompt: Prompt = self._store[self._places[row]][self.prompt_field]
        return prompt

    def fields(self, row: int) -> dict[str, Any]:
        """Everything in a row but its prompt."""
        return {key: value for key, value in self._store[self._places[row]].items() if key != self.prompt_field}

    def place(self, row: int) -> str:
        """Where a row stands in the source, for people: "prompts.jsonl, line 3" or "row 3 (counted from 1)"."""
        return self._name(self._numbers[row])

    def keep(self, rows: Sequence[int]) -> None:
        """Leave only the given rows."""
        self._numbers = [self._numbers[row] for row in rows]
        self._places = [self._places[row] for row in rows]

    def _name(self, number: int) -> str:
        return f"{self._prefix}{number}{self._suffix}"

    def _usable(
        self,
        candidates: Iterable[tuple[int, Any]],
        read: Callable[[Any], Mapping[str, Any]],
        on_bad_row: Literal["error", "skip"],
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the usable rows, noting the number of each; judge the whole source at its end."""
        first_bad = ""
        for number, candidate in candidates:
            try:
                row = read(candidate)
                _check_prompt(row, self.prompt_field)
            except _BadRowError as error:
                bad = f"{self._name(number)}: {error}"
                if on_bad_row == "error":
                    raise ValueError(
                        f"AsyncRolloutDataset: bad row at {bad}. Mend it, or pass on_bad_row='skip' to leave bad rows "
                        "out."
                    ) from error
                first_bad = first_bad or bad
                self.skipped += 1
                continue
            self._numbers.append(number)
            yield row
        if not self._numbers:
            reason = f"all {self.skipped} rows are bad, the first at {first_bad}" if self.skipped else "it has no rows"
            raise ValueError(f"AsyncRolloutDataset: the source holds no usable prompt: {reason}.")
        if self.skipped:
            rank_zero_warn(f"AsyncRolloutDataset: skipped {self.skipped} bad rows, the first at {first_bad}.")


@dataclass(frozen=True)
class EncodedPrompt:
    """A tokenised prompt."""

    text: str
    """The prompt as text, after the chat template, never cut."""
    ids: array[int]
    """Its token ids; an array, because a list of Python integers takes up to nine times the memory."""


@dataclass(frozen=True)
class PromptEncoder:
    """Turns prompts into token ids with exactly one BOS where the tokenizer uses one.

    The special tokens that the tokenizer writes before a text by default (BOS) are put in front of every prompt, raw or
    templated, that does not begin with them already, be it through its template or its own text. What the tokenizer
    would write *behind* a text (EOS) is left out: a response follows a prompt.
    """

    tokenizer: PreTrainedTokenizerBase
    prefix: tuple[int, ...]
    """The special tokens in front of every prompt."""
    limit: int | None
    """Tokens that a prompt is cut to, the prefix included; None never cuts."""
    cut_side: Literal["left", "right"]
    """Where a longer prompt loses tokens; the prefix stays."""

    @classmethod
    def create(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        probe: Prompt,
        place: str,
        *,
        limit: int | None = None,
        cut_side: Literal["left", "right"] = "right",
    ) -> PromptEncoder:
        """Make an encoder over a copy of ``tokenizer``, learning its special prefix from one prompt.

        A copy, because a fast tokenizer raises "Already borrowed" when one thread changes its padding while another
        encodes, and prompts are tokenised beside the training thread.

        Args:
            tokenizer: A transformers tokenizer.
            probe: Any prompt of the data.
            place: Where it stands in the source, for error messages.
            limit: As the attribute.
            cut_side: As the attribute.

        Raises:
            ValueError: The chat template or the tokenizer failed on the probe.
        """
        encoder = cls(copy.deepcopy(tokenizer), (), limit, cut_side)
        text = encoder.encode([probe], [place])[0].text
        text = text.removeprefix(encoder.tokenizer.bos_token or "") or text
        return cls(encoder.tokenizer, _special_prefix(encoder.tokenizer, text), limit, cut_side)

    def encode(self, prompts: Sequence[Prompt], places: Sequence[str]) -> list[EncodedPrompt]:
        """Tokenise prompts.

        Args:
            prompts: At least one prompt.
            places: Where each stands in the source, for error messages.

        Raises:
            ValueError: The chat template or the tokenizer failed on a prompt, or gave no token; the place is named.
        """
        texts = [self._render(prompt, place) for prompt, place in zip(prompts, places, strict=True)]
        token_lists = self._tokenize(texts, places)
        for ids, place in zip(token_lists, places, strict=True):
            if not ids:
                raise ValueError(f"AsyncRolloutDataset: the prompt at {place} has no tokens; remove or mend it.")
        return [
            EncodedPrompt(text, array("i", self._finish(ids))) for text, ids in zip(texts, token_lists, strict=True)
        ]

    def _render(self, prompt: Prompt, place: str) -> str:
        if isinstance(prompt, str):
            return prompt
        try:
            messages = [dict(message) for message in prompt]
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates are programs of model authors and raise anything
            raise ValueError(
                f"AsyncRolloutDataset: the chat template failed on {place}: {type(error).__name__}: {error}. Mend its "
                "messages, or give the tokenizer a chat_template that takes them."
            ) from error

    def _tokenize(self, texts: list[str], places: Sequence[str]) -> list[list[int]]:
        try:
            token_lists: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        except Exception as error:
            if len(texts) == 1:
                raise ValueError(
                    f"AsyncRolloutDataset: tokenising {places[0]} failed: {type(error).__name__}: {error}. Mend or "
                    "remove the row."
                ) from error
            # The call does not tell which of the texts it failed on: one by one, the guilty one is named.
            pairs = zip(texts, places, strict=True)
            return [ids for text, place in pairs for ids in self._tokenize([text], [place])]
        return token_lists

    def _finish(self, ids: list[int]) -> list[int]:
        prefix = list(self.prefix)
        body = ids[len(prefix) :] if ids[: len(prefix)] == prefix else ids
        if self.limit is None or len(prefix) + len(body) <= self.limit:
            return prefix + body
        if self.cut_side == "right":
            return (prefix + body)[: self.limit]
        if len(prefix) >= self.limit:  # no room for both: the prompt's own tokens matter more
            prefix = []
        return prefix + body[len(body) - (self.limit - len(prefix)) :]


def _special_prefix(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The special tokens that a tokenizer writes before a text by default."""
    bare: list[int] = tokenizer([text], add_special_tokens=False)["input_ids"][0]
    default: list[int] = tokenizer([text])["input_ids"][0]
    for start in range(len(default) - len(bare) + 1):
        if default[start : start + len(bare)] == bare:
            return tuple(default[:start])
    return tuple(default[:1]) if default[:1] == [tokenizer.bos_token_id] else ()


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    if not path.is_file():
        raise FileNotFoundError(
            f"AsyncRolloutDataset: there is no file at '{path}'. A text is taken as the path of a JSONL file; pass "
            "rows of another kind as a list of mappings or a dataset object."
        )
    with path.open("rb") as file:  # bytes, so that a line that is not UTF-8 still has its number
        for number, line in enumerate(file, 1):
            content = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
            if content:
                yield number, content


def _parse_line(line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRowError(f"not UTF-8: byte 0x{line[error.start]:02x} at place {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise _BadRowError(f"not valid JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:  # a number with too many digits, brackets too deep
        raise _BadRowError(f"not readable JSON: {error}") from error
    return _as_mapping(row)


def _as_mapping(row: Any) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise _BadRowError(f"a row must be a mapping (a JSON object), not a {type(row).__name__}")
    return row


def _check_prompt(row: Mapping[str, Any], prompt_field: str) -> None:
    if prompt_field not in row:
        raise _BadRowError(f"the key {prompt_field!r} is missing, the row has {sorted(map(str, row))}")
    prompt = row[prompt_field]
    if prompt is None:
        raise _BadRowError(f"{prompt_field!r} is null")
    if not isinstance(prompt, str | list | tuple):
        raise _BadRowError(f"{prompt_field!r} must be a string or a list of messages, not {type(prompt).__name__}")
    if not prompt:
        raise _BadRowError(f"{prompt_field!r} is empty")
    for text in [prompt] if isinstance(prompt, str) else [_message_text(message) for message in prompt]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON escapes can spell
            raise _BadRowError(f"{prompt_field!r} is not valid Unicode text: {error.reason}") from error


def _message_text(message: Any) -> str:
    """The text of a message, empty where its content is not plain text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _BadRowError(f"a message must be a mapping with 'role' and 'content', not {message!r:.80}")
    content = message.get("content")
    if not isinstance(content, str | list) and "tool_calls" not in message:
        raise _BadRowError(f"the content of a {message['role']!r} message must be a text, not {content!r:.80}")
    return content if isinstance(content, str) else ""
