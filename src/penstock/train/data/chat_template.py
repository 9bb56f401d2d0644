"""Turning conversations into marked token ids, by the chat template of a tokenizer of transformers.

    messages     user "2 + 2?"                     assistant "4"
    text         <|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\n4<|im_end|>\\n
    learned                                                                └─────────┘

A turn of the assistant is learned with the token that ends it, so that the trained model ends its turns. A template
says where these are by `{% generation %}`: it is rendered again with marks in the places of these tags. Where it does
not, the conversation is also rendered up to each turn, with the beginning that the template gives to an answer, and up
to its end. Both must be beginnings of the whole text.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.train.data.chat_files import ASSISTANT
from penstock.train.data.corpus import FILES_KEY
from penstock.train.data.learned import marked
from penstock.train.data.tokenizer import Tokenizer, tokenizer_of
from penstock.train.settings.config import RunConfig
from penstock.train.settings.optional_packages import CHAT_TEMPLATES

TEMPLATE_KEY = "data.chat_template"
TAG = "{% generation %}"
"""What templates have around the turns of the assistant, if anything."""
TAG_PATTERN = re.compile(r"\{%-?\s*generation\s*-?%\}")
TAGS = re.compile(r"\{%(?P<left>-?)\s*(?P<is_end>end)?generation\s*(?P<right>-?)%\}")
TURN_BEGIN, TURN_END = "\ufdd0", "\ufdd1"
"""Marks in the places of the tags: code points that Unicode keeps out of texts."""
PROBE = ({"role": "user", "content": "a"},)
Message = dict[str, Any]


def chat_tokenizer(config: RunConfig, learn: str) -> Tokenizer:
    """Return the tokenizer of a run for conversations: from the JSON text of messages to marked ids.

    `learn` is the value of `data.learn`.

    Raises:
        ConfigError: there is no chat template, or it is damaged; or as `tokenizer_of` does.
    """
    tokenizer = tokenizer_of(config)
    encoder = ChatEncoder(_load(config), learn, tokenizer.vocabulary, config.data.tokenizer)
    identity = hashlib.sha256(f"{tokenizer.identity} {learn} {encoder.identity}".encode()).hexdigest()
    # A template ends turns by itself, so nothing is added behind the last one.
    return Tokenizer(identity, 2 * tokenizer.vocabulary, encoder.encode, tokenizer.decode, None)


def require_chat_template(config: RunConfig) -> None:
    """Refuse a run on conversations without a chat template that can be read. Raises: ConfigError."""
    if config.data.has_chats:
        chat_tokenizer(config, ASSISTANT)


@dataclass(frozen=True)
class ChatEncoder:
    """A tokenizer of transformers with its chat template."""

    tokenizer: Any
    learn: str
    vocabulary: int
    """Number of ids that the tokenizer's file has."""
    place: str
    """The name of that file, for messages."""

    @cached_property
    def identity(self) -> str:
        """A text that is equal for two encoders only if they give equal ids."""
        tokens = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        # Files beside tokenizer.json may change what is in it, such as the white space that added tokens take.
        rules = hashlib.sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
        settings = [rules, bool(getattr(self.tokenizer, "split_special_tokens", False))]
        return json.dumps([self.tokenizer.chat_template, tokens, settings], sort_keys=True)

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """Return the marked ids of a conversation. Raises: ConfigError."""
        messages: list[Message] = orjson.loads(content)
        if self.learn == "all":
            ids = self._ids_and_offsets(self._rendered(messages))[0]
            is_learned = np.ones(len(ids), dtype=bool)
        else:
            ids, is_learned = self._by_tags(messages) if self._has_tags else self._by_prefixes(messages)
        self._require_known(ids)
        if not is_learned[1:].any():
            raise ConfigError(
                "the chat template gives the assistant's turns no tokens, so that nothing is learned from it; leave it "
                f"out, or mend the template's {TAG}",
                key=FILES_KEY,
            )
        return marked(np.asarray(ids), is_learned).astype(np.uint32)

    @cached_property
    def _has_tags(self) -> bool:
        return TAG_PATTERN.search(self.tokenizer.get_chat_template()) is not None

    def _by_tags(self, messages: Sequence[Message]) -> tuple[Sequence[int], NDArray[np.bool_]]:
        """Return ids, and whether each has a character within `{% generation %}`. Raises: ConfigError.

        The masks of transformers are not used. They leave out all but the first token of a turn's last character, all
        turns behind one that begins with a character without a token, and count from a wrong place within macros.
        """
        text = self._rendered(messages)
        pieces = re.split(f"([{TURN_BEGIN}{TURN_END}])", self._rendered(messages, chat_template=self._marked_template))
        turns, begins, place = [], list[int](), 0
        for piece in pieces:
            if piece == TURN_BEGIN:
                begins.append(place)
            elif piece == TURN_END and begins:
                turns.append((begins.pop(), place))
            elif not text.startswith(piece, place):
                break
            else:
                place += len(piece)
        if place != len(text) or begins:
            raise ConfigError(
                f"its tokens within {TAG} cannot be found: the chat template works on what is between its tags, or the "
                f"text has the character {TURN_BEGIN!r} or {TURN_END!r}. Write the tags where the turn goes into the "
                "text, or leave the conversation out",
                key=FILES_KEY,
            )
        return self._within(text, turns)

    @cached_property
    def _marked_template(self) -> str:
        """The template, with marks that it writes where its tags are."""

        # The two blocks keep the rules of white space that hold at a tag, which differ from those at an expression.
        def marks(tag: re.Match[str]) -> str:
            block, mark = ("endif", TURN_END) if tag["is_end"] else ("if true", TURN_BEGIN)
            return f"{{%{tag['left']} {block} %}}{{{{ '{mark}' }}}}{{% {block} {tag['right']}%}}"

        return TAGS.sub(marks, self.tokenizer.get_chat_template())

    def _by_prefixes(self, messages: Sequence[Message]) -> tuple[Sequence[int], NDArray[np.bool_]]:
        """Return ids, and whether each is of a turn of the assistant, or has a character of one."""
        text = self._rendered(messages)
        numbers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        return self._within(text, [self._turn(messages, number, text) for number in numbers])

    def _within(self, text: str, turns: Sequence[tuple[int, int]]) -> tuple[Sequence[int], NDArray[np.bool_]]:
        """Return the ids of a text, and whether each has a character of one of the turns, from a place to another."""
        ids, offsets = self._ids_and_offsets(text)
        begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), dtype=bool)
        for begin, end in turns:
            mask |= (begins < end) & (ends > begin)
        return ids, mask

    def _turn(self, messages: Sequence[Message], number: int, text: str) -> tuple[int, int]:
        """Return where a turn of the assistant begins and ends in the text of the conversation. Raises: ConfigError."""
        before = self._rendered(messages[:number], add_generation_prompt=True) if number else None
        through = self._rendered(messages[: number + 1])
        if before is None or not (text.startswith(through) and through.startswith(before)):
            reason = (
                "the chat template writes the messages up to it otherwise than in the whole conversation"
                if number
                else "nothing is before it"
            )
            raise ConfigError(
                f"message {number} is the assistant's, but its tokens cannot be found: {reason}. Give a template with "
                f"{TAG} around such turns in {TEMPLATE_KEY}, or set data.learn = 'all'",
                key=FILES_KEY,
            )
        self._require_no_further_answer(messages, number, before, through)
        return len(before), len(before) + len(self._without_line_end(through[len(before) :]))

    def _require_no_further_answer(self, messages: Sequence[Message], number: int, before: str, through: str) -> None:
        """Refuse a template that begins an answer behind each text, also where nobody has asked for it.

        `before` is the text up to a turn of the assistant, and `through` that with the turn.
        """
        content = str(messages[number].get("content") or "").strip()
        behind_turn = through[through.rfind(content) + len(content) :]
        if before != self._rendered(messages[:number]) or not content:
            return  # it begins an answer where it is asked to, and so not here
        pairs = zip(reversed(before), reversed(behind_turn), strict=False)
        shared_end = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))[::-1]
        if any(character.isalnum() for character in shared_end):
            raise ConfigError(
                f"the chat template writes {shared_end!r} behind the assistant's turn too, which would be "
                f"learned with it; let it do so where add_generation_prompt is true alone, or put {TAG} around turns",
                key=FILES_KEY,
            )

    def _without_line_end(self, turn: str) -> str:
        """Leave out the white space behind the token that ends a turn: a model is stopped at that token."""
        stripped = turn.rstrip()
        return stripped if stripped.endswith(tuple(self.tokenizer.added_tokens_encoder)) else turn

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
        return str(self._applied(messages, tokenize=False, **options))

    def _ids_and_offsets(self, text: str) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoding["input_ids"], encoding["offset_mapping"]

    def _applied(self, messages: Sequence[Message], **options: Any) -> Any:
        """Apply the template. Raises: ConfigError, with the words in which it refuses the messages."""
        try:
            return self.tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:  # templates are programs, and raise what they like
            raise ConfigError(
                f"the chat template refuses it: {error}. Change its roles or its content, or name another template in "
                f"{TEMPLATE_KEY}",
                key=FILES_KEY,
            ) from error

    def _require_known(self, ids: Sequence[int]) -> None:
        """Refuse an id that the tokenizer's file does not have: files beside it may add tokens. Raises: ConfigError."""
        if ids and max(ids) >= self.vocabulary:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            raise ConfigError(
                f"has the token {token!r} of id {max(ids)}, but {self.place} has {self.vocabulary} ids; save the "
                "tokenizer and its model anew, with as many ids in both",
                key="data.tokenizer",
            )


def _load(config: RunConfig) -> Any:
    """Return the tokenizer of transformers with the chat template of a run. Raises: ConfigError."""
    tokenizer_class = CHAT_TEMPLATES.load().PreTrainedTokenizerFast
    path, template_file = Path(config.data.tokenizer), config.data.chat_template
    try:
        # The files beside tokenizer.json have the template, and the names of tokens that it writes.
        if path.name == "tokenizer.json" and path.with_name("tokenizer_config.json").is_file():
            tokenizer = tokenizer_class.from_pretrained(path.parent)
        else:
            tokenizer = tokenizer_class(tokenizer_file=str(path))
    except Exception as error:  # of transformers and of tokenizers, of any type
        raise ConfigError(f"{path}: transformers cannot read it: {error}", key="data.tokenizer") from error
    if template_file:
        tokenizer.chat_template = _read(template_file)
    try:
        tokenizer.get_chat_template()
    except ValueError as error:
        raise ConfigError(
            f"{path} has no chat template beside it. Name a Jinja file here, or the tokenizer.json of another model in "
            "data.tokenizer",
            key=TEMPLATE_KEY,
        ) from error
    _require_template(tokenizer, template_file or str(path.parent))
    return tokenizer


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{file}: cannot be read: {reason}. Name a file with a Jinja template", key=TEMPLATE_KEY
        ) from error


def _require_template(tokenizer: Any, place: str) -> None:
    """Refuse a template that is no Jinja; one may refuse the probe as a conversation. Raises: ConfigError."""
    import jinja2

    try:
        tokenizer.apply_chat_template(list(PROBE), tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{place}: the chat template is no Jinja: line {error.lineno}: {error.message}. Mend it, or name another "
            "file",
            key=TEMPLATE_KEY,
        ) from error
    except Exception:
        return
