"""Write a tiny Llama that knows a chat template, and a folder of chats: python make_tiny.py tiny-chat chats

They stand for a model that you have downloaded and for conversations of yours, and take a second to make.
"""

import json
import sys
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(model_folder, chats_folder):
    Path(chats_folder).mkdir(exist_ok=True)
    with Path(chats_folder, "sums.jsonl").open("w") as file:
        for first, second in product(range(20), repeat=2):
            said = [
                f"What is {first} + {second}?",
                f"It is {first + second}.",
                "And one more?",
                f"{first + second + 1}.",
            ]
            roles = ["user", "assistant"] * (1 + second % 2)
            messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
            file.write(json.dumps({"messages": messages}) + "\n")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    alphabet = byte_level.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["user assistant What is It is And one more?"], trainer)
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    saved.chat_template = CHATML
    saved.save_pretrained(model_folder)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model_folder)


if __name__ == "__main__":
    write(*sys.argv[1:])
