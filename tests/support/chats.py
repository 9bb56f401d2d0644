"""Chat templates in the styles of public models, texts as these styles write them by hand, and small tokenizers."""

import json
import re
from dataclasses import dataclass
from functools import cache

import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TOKENS = [
    *("<s>", "</s>", "[INST]", "[/INST]"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>"),
]


@dataclass(frozen=True)
class Style:
    """How a model writes conversations."""

    template: str
    """With `{tag}` before what a turn says, and `{end}` behind it."""
    begin: str
    turns: dict[str, tuple[str, str, str]]
    """By role, what is before the content, and behind it: the part that belongs to the turn, and the rest."""
    bos: str | None = None
    lead: str = ""
    """What the assistant says before the content."""

    def tagged(self):
        """Return the template with tags around the turns of the assistant."""
        tagged = r"{% if m['role'] == 'assistant' %}{% generation %}\1{% endgeneration %}{% else %}\1{% endif %}"
        return re.sub(r"{tag}(.*?){end}", tagged, self.template)

    def plain(self):
        """Return the template without tags."""
        return self.template.replace("{tag}", "").replace("{end}", "")

    def pieces(self, messages):
        """Return the text of a conversation in pieces, each with whether it is learned."""
        pieces = [(self.begin, False)]
        for message in messages:
            before, ending, rest = self.turns[message["role"]]
            if message["role"] == "assistant":
                pieces += [(before, False), (self.lead + message["content"] + ending, True), (rest, False)]
            else:
                pieces.append((before + message["content"] + ending + rest, False))
        return [piece for piece in pieces if piece[0]]


CHATML = Style(
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{tag}{{ m['content'] }}<|im_end|>{end}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "",
    {role: (f"<|im_start|>{role}\n", "<|im_end|>", "\n") for role in ("system", "user", "assistant")},
)
LLAMA_3 = Style(
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{tag}{{ m['content'] | trim }}<|eot_id|>{end}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "<|begin_of_text|>",
    {
        role: (f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "")
        for role in ("system", "user", "assistant")
    },
    "<|begin_of_text|>",
)
ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."
MISTRAL = Style(
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('" + ALTERNATE + "') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %}{tag} {{ m['content'] }}</s>{end}"
    "{% endif %}{% endfor %}",
    "<s>",
    {"user": ("[INST] ", " [/INST]", ""), "assistant": ("", "</s>", "")},
    "<s>",
    " ",
)
GEMMA = Style(
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{tag}{{ m['content'] | trim }}<end_of_turn>{end}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "<bos>",
    {
        "user": ("<start_of_turn>user\n", "<end_of_turn>", "\n"),
        "assistant": ("<start_of_turn>model\n", "<end_of_turn>", "\n"),
    },
    "<bos>",
)
ZEPHYR = Style(
    "{% for m in messages %}<|{{ m['role'] }}|>\n{tag}{{ m['content'] }}</s>{end}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "",
    {role: (f"<|{role}|>\n", "</s>", "\n") for role in ("system", "user", "assistant")},
)
STYLES = {"chatml": CHATML, "llama-3": LLAMA_3, "mistral": MISTRAL, "gemma": GEMMA, "zephyr": ZEPHYR}


def said(*contents, first="user"):
    """Return messages of the user and the assistant by turns."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


def with_system(content, messages):
    return [{"role": "system", "content": content}, *messages]


@cache
def trained_tokenizer():
    """Return a byte-level tokenizer that has the tokens of all styles."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=TOKENS, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["what is it, and what is that? it is this, and that is it. user assistant"], trainer)
    return tokenizer


def save_chat_tokenizer(folder, template=None, bos=None):
    """Write such a tokenizer with a template; return the path of its file."""
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=trained_tokenizer(), bos_token=bos, eos_token="</s>")
    saved.chat_template = template
    saved.save_pretrained(folder)
    return str(folder / "tokenizer.json")


def write_chats(path, conversations, column="messages"):
    """Write conversations as JSON lines."""
    path.write_text("".join(json.dumps({column: messages}) + "\n" for messages in conversations))
    return str(path)
