"""Write a tiny T5 with random weights, as a folder of Hugging Face: python make_tiny.py tiny-t5

It stands for a model that you have downloaded, and takes a second to make.
"""

import sys

import torch
from transformers import T5Config, T5ForConditionalGeneration


def write(folder):
    config = T5Config(
        vocab_size=512,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=4,
        num_decoder_layers=4,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    T5ForConditionalGeneration(config).save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1])
