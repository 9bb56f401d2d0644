"""Chat templates: ids and masks against texts that are put together by hand, and what is refused."""

import json
import sys

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.train.data.chat_template import chat_tokenizer, require_chat_template
from penstock.train.data.learned import ids_of, is_learned
from penstock.train.settings.config import config_from_table
from tests.support.chats import (
    ALTERNATE,
    CHATML,
    GEMMA,
    LLAMA_3,
    MISTRAL,
    STYLES,
    TOKENS,
    said,
    save_chat_tokenizer,
    with_system,
)
from tests.train.tiny_runs import tiny_table

transformers = pytest.importorskip("transformers")

SHORT = said("what is it?", "it is this.")
LONG = said("what is that?", "that, and this", "and it?", "é 🙂 \\o/ 🙂", "<b>?</b>", "")


@pytest.fixture
def tokenizer(tmp_path):
    """Return the tokenizer of a run, by template and the token before a conversation."""

    def make(template, bos=None, learn="assistant", **data):
        path = save_chat_tokenizer(tmp_path / "model", template, bos)
        return chat_tokenizer(config_of(path, **data), learn)

    return make


def config_of(path, **data):
    chats = {"corpus": "chats", "files": ["a.jsonl"], "tokenizer": path}
    return config_from_table(tiny_table("run", data=chats | data))


def encoded(tokenizer, messages):
    """Return the ids of a conversation, and which of them are learned."""
    marked = tokenizer.encode(json.dumps(messages).encode())
    return ids_of(marked).tolist(), is_learned(marked).tolist()


def by_hand(style, messages, path):
    """Return the same from the pieces of the text, each turned into ids by itself."""
    import tokenizers

    plain = tokenizers.Tokenizer.from_file(str(path))
    pieces = [(plain.encode(text, add_special_tokens=False).ids, mark) for text, mark in style.pieces(messages)]
    return [id for ids, _ in pieces for id in ids], [mark for ids, mark in pieces for _ in ids]


@pytest.mark.feature("X57")
@pytest.mark.parametrize("kind", ["tagged", "plain"])
@pytest.mark.parametrize("messages", [SHORT, LONG, said("a", "b", "c")], ids=["one turn", "three turns", "unanswered"])
@pytest.mark.parametrize("name", STYLES)
def test_the_turns_of_the_assistant_are_learned_with_the_token_that_ends_them(
    tokenizer, tmp_path, name, messages, kind
):
    style = STYLES[name]

    ids, mask = encoded(tokenizer(getattr(style, kind)(), style.bos), messages)

    assert (ids, mask) == by_hand(style, messages, tmp_path / "model" / "tokenizer.json")


@pytest.mark.parametrize("name", ["chatml", "llama-3", "zephyr"])
@pytest.mark.parametrize("kind", ["tagged", "plain"])
def test_what_the_system_says_is_not_learned(tokenizer, tmp_path, name, kind):
    style, messages = STYLES[name], with_system("be it", LONG)

    ids, mask = encoded(tokenizer(getattr(style, kind)(), style.bos), messages)

    assert (ids, mask) == by_hand(style, messages, tmp_path / "model" / "tokenizer.json")


def test_all_tokens_are_learned_where_all_speak(tokenizer, tmp_path):
    ids, mask = encoded(tokenizer(CHATML.plain(), learn="all"), SHORT)

    assert ids == by_hand(CHATML, SHORT, tmp_path / "model" / "tokenizer.json")[0]
    assert all(mask)


def test_line_ends_behind_a_turn_that_no_token_ends_are_learned_for_they_end_it(tokenizer):
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{{ '\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"

    found = tokenizer(template)
    ids, mask = encoded(found, said("a", "b"))

    assert found.decode([id for id, mark in zip(ids, mask, strict=True) if mark]) == " b\n\n"


@pytest.mark.parametrize(
    ("name", "learned"),
    [
        ("llama-3", ["i", "t", "▁is", "▁it", "<|eot_id|>", "y", "e", "s", "<|eot_id|>"]),
        ("mistral", ["▁it", "▁is", "▁it", "</s>", "▁", "y", "e", "s", "</s>"]),
    ],
)
@pytest.mark.parametrize("kind", ["tagged", "plain"])
def test_a_tokenizer_that_joins_a_space_with_the_word_behind_it_learns_both(tmp_path, name, learned, kind):
    tokenizers, style = pytest.importorskip("tokenizers"), STYLES[name]
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    alphabet = [chr(code) for code in range(33, 127)] + ["\n"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(["what is it? it is it."], trainer)
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token=style.bos, eos_token="</s>")
    saved.chat_template = getattr(style, kind)()
    saved.save_pretrained(tmp_path)

    ids, mask = encoded(
        chat_tokenizer(config_of(str(tmp_path / "tokenizer.json")), "assistant"), said("is it?", "it is it", "?", "yes")
    )

    found = saved.convert_ids_to_tokens([id for id, mark in zip(ids, mask, strict=True) if mark])
    assert found == learned


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>it</think>{% endif %}{{ m['content'] }}<|im_end|>"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (THINKS, said("a", "b", "c", "d"), "message 1 .* otherwise than in the whole conversation"),
        (CHATML.plain(), said("a", "b", first="assistant"), "message 0 .* nothing is before it"),
        (CHATML.plain() + "{% if not add_generation_prompt %}</s>{% endif %}", said("a", "b", "c"), "message 1 "),
    ],
)
def test_a_template_whose_texts_of_a_part_and_of_the_whole_do_not_agree_is_refused(
    tokenizer, template, messages, reason
):
    with pytest.raises(ConfigError, match=rf"{reason}.*\{{% generation %\}} around such turns in data\.chat_template"):
        encoded(tokenizer(template), messages)


def test_a_template_that_begins_an_answer_behind_each_text_is_refused(tokenizer):
    always = CHATML.plain().replace("add_generation_prompt", "true")
    for messages in (said("a", "b"), said("a", "b", "c", "d")):
        with pytest.raises(ConfigError, match=r"behind the assistant's turn too|cannot be found"):
            encoded(tokenizer(always), messages)


def test_such_a_template_with_tags_is_taken(tokenizer):
    tagged = THINKS.replace("{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}")
    found = tokenizer(tagged)

    ids, mask = encoded(found, said("a", "b", "c", "d"))

    assert found.decode([id for id, mark in zip(ids, mask, strict=True) if mark]) == "abcd"  # as the tags say


ONLY_CONTENT = (
    "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}" + ONLY_CONTENT + "{% endfor %}",
        "{% macro turn(m) %}" + ONLY_CONTENT + "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
        "{% for m in messages %}{% set turn %}" + ONLY_CONTENT + "{% endset %}{{ turn }}{% endfor %}",
        "{% for m in messages %}\n  "
        + ONLY_CONTENT.replace("{% gen", "{%- gen").replace("eration %}", "eration -%}")
        # The rules of white space at tags hold: that on both sides of them is left out.
        + "\n{% endfor %}",
    ],
    ids=["in a loop", "in a macro", "in a set block", "without white space"],
)
def test_all_bytes_of_what_is_between_tags_are_learned_wherever_the_tags_are(tokenizer, template):
    found = tokenizer(template)

    ids, mask = encoded(found, said("what is it?", "\N{SLIGHTLY SMILING FACE}", "", "", "and it?", "it is \u00e9"))

    assert (
        found.decode([id for id, mark in zip(ids, mask, strict=True) if mark])
        == "\N{SLIGHTLY SMILING FACE}it is \u00e9"
    )


def test_turns_behind_one_that_begins_with_a_character_without_a_token_are_learned(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = ["?", "a", "b", "one", "two", "user", "assistant", "<|im_start|>", "<|im_end|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain.add_special_tokens(words[-2:])
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=plain)
    saved.chat_template = CHATML.tagged()
    saved.save_pretrained(tmp_path)

    found = chat_tokenizer(config_of(str(tmp_path / "tokenizer.json")), "assistant")
    ids, mask = encoded(found, said("a", " one", "b", "two"))

    assert saved.convert_ids_to_tokens([id for id, mark in zip(ids, mask, strict=True) if mark]) == [
        *("one", "<|im_end|>", "two", "<|im_end|>")
    ]


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        ("{% for m in messages %}{% set t %}" + ONLY_CONTENT + "{% endset %}{{ t | length }}{% endfor %}", SHORT),
        ("{% for m in messages %}" + ONLY_CONTENT + "{% endfor %}", said("a", "b \ufdd0")),
    ],
    ids=["length of the text", "mark in the text"],
)
def test_a_template_that_works_on_what_is_between_its_tags_is_refused(tokenizer, template, messages):
    found = tokenizer(template)

    with pytest.raises(ConfigError, match=r"its tokens within \{% generation %\} cannot be found") as caught:
        encoded(found, messages)
    assert caught.value.key == "data.files"


@pytest.mark.parametrize(
    ("style", "messages", "words"),
    [
        (MISTRAL, said("a", "b", first="assistant"), ALTERNATE),
        (GEMMA, with_system("be it", SHORT), "System role not supported"),
        (MISTRAL, with_system("be it", SHORT), ALTERNATE),
    ],
)
@pytest.mark.parametrize("kind", ["tagged", "plain"])
def test_roles_that_the_template_refuses_are_refused_in_its_words(tokenizer, style, messages, words, kind):
    with pytest.raises(ConfigError, match="the chat template refuses it: ") as caught:
        encoded(tokenizer(getattr(style, kind)(), style.bos), messages)

    assert words in str(caught.value)
    assert "Change its roles or its content, or name another template in data.chat_template" in str(caught.value)


def test_tags_around_nothing_are_refused(tokenizer):
    template = CHATML.plain() + "{% generation %}{% endgeneration %}"

    with pytest.raises(ConfigError, match="gives the assistant's turns no tokens, so that nothing is learned"):
        encoded(tokenizer(template), SHORT)


def test_a_token_that_the_file_does_not_have_is_refused_by_name(tokenizer, tmp_path):
    save_chat_tokenizer(tmp_path / "model", CHATML.plain())
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    added = {"content": "<extra>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    settings["added_tokens_decoder"] = {"999": added | {"special": True}}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    found = chat_tokenizer(config_of(str(tmp_path / "model" / "tokenizer.json")), "assistant")

    with pytest.raises(
        ConfigError, match=r"has the token '<extra>' of id \d+, but .*tokenizer\.json has \d+ ids"
    ) as caught:
        encoded(found, said("a <extra>", "b"))
    assert caught.value.key == "data.tokenizer"


def test_files_beside_the_tokenizer_that_change_ids_change_its_identity(tokenizer, tmp_path):
    messages = said("a", "b</s>  c")
    before = tokenizer(CHATML.plain())
    file = tmp_path / "model" / "tokenizer_config.json"
    token = {"content": "</s>", "lstrip": True, "rstrip": True, "normalized": False, "single_word": False}
    number = before.encode(json.dumps(said("a", "</s>")).encode())[-3] >> 1
    added = {"added_tokens_decoder": {str(number): token | {"special": True}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | added))
    after = chat_tokenizer(config_of(str(tmp_path / "model" / "tokenizer.json")), "assistant")

    assert encoded(after, messages) != encoded(before, messages)
    assert after.identity != before.identity
    again = chat_tokenizer(config_of(str(tmp_path / "model" / "tokenizer.json")), "assistant")
    assert again.identity == after.identity


def test_the_template_is_beside_the_tokenizer_unless_another_is_named(tokenizer, tmp_path):
    (tmp_path / "other.jinja").write_text(GEMMA.plain())
    other = tokenizer(CHATML.plain(), GEMMA.bos, chat_template=str(tmp_path / "other.jinja"))
    own = tokenizer(CHATML.plain(), GEMMA.bos)

    assert encoded(other, SHORT) == by_hand(GEMMA, SHORT, tmp_path / "model" / "tokenizer.json")
    assert encoded(own, SHORT) == by_hand(CHATML, SHORT, tmp_path / "model" / "tokenizer.json")
    identities = {other.identity, own.identity, tokenizer(CHATML.plain(), GEMMA.bos, learn="all").identity}
    identities |= {tokenizer(CHATML.plain(), "<s>").identity, tokenizer(CHATML.tagged(), GEMMA.bos).identity}
    assert len(identities) == 5
    assert own.identity == tokenizer(CHATML.plain(), GEMMA.bos).identity


def test_a_file_that_lies_alone_takes_a_named_template(tmp_path):
    path = save_chat_tokenizer(tmp_path / "model")
    (tmp_path / "alone.json").write_bytes((tmp_path / "model" / "tokenizer.json").read_bytes())
    (tmp_path / "t.jinja").write_text(CHATML.plain())

    found = chat_tokenizer(
        config_of(str(tmp_path / "alone.json"), chat_template=str(tmp_path / "t.jinja")), "assistant"
    )

    assert encoded(found, SHORT) == by_hand(CHATML, SHORT, path)


def test_no_template_a_damaged_one_and_one_that_cannot_be_read_are_named(tmp_path):
    path = save_chat_tokenizer(tmp_path / "model")
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}\n{{ m['content' }}")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe")

    for template, problem in (
        ("", r"model/tokenizer\.json has no chat template beside it\. Name a Jinja file here"),
        (str(tmp_path / "none.jinja"), r"none\.jinja: cannot be read: No such file"),
        (str(tmp_path / "binary.jinja"), r"binary\.jinja: cannot be read: .*utf-8"),
        (str(tmp_path / "broken.jinja"), r"broken\.jinja: the chat template is no Jinja: line 2: "),
    ):
        with pytest.raises(ConfigError, match=problem) as caught:
            require_chat_template(config_of(path, chat_template=template))
        assert caught.value.key == "data.chat_template"


def test_without_transformers_the_way_out_is_named(tmp_path, monkeypatch):
    path = save_chat_tokenizer(tmp_path / "model", CHATML.plain())
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(ConfigError, match=r"data\.corpus: needs the transformers package .*pip install") as caught:
        require_chat_template(config_of(path))
    assert caught.value.key == "data.corpus"


def test_other_runs_need_no_template():
    require_chat_template(config_from_table(tiny_table("run", "a.txt")))


def test_marks_fit_into_the_ids(tokenizer):
    found = tokenizer(LLAMA_3.plain(), LLAMA_3.bos)

    marked = found.encode(json.dumps(SHORT).encode())

    assert marked.dtype == np.uint32
    assert marked.max() < found.vocabulary
    assert found.end_of_document is None
