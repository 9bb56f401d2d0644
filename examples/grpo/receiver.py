"""Stands for an inference engine: takes weights of several senders, and generates. train.py starts it."""

import os
import sys
from multiprocessing.connection import Listener
from threading import Condition, Thread

import torch
from transformers import AutoModelForCausalLM


class Engine:
    """A model whose weights are replaced all together, or not at all."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.changed, self.arrived, self.version = Condition(), {}, 0

    def take(self, name, values):
        with self.changed:
            self.arrived[name] = torch.from_numpy(values)
            self.changed.notify_all()

    def finish(self, names):
        """Wait for the weights of all senders, and load them."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.arrived.keys() >= set(names), 60):
                raise TimeoutError(f"{sorted(set(names) - self.arrived.keys())[0]!r} has not come; send all again")
            self.model.load_state_dict(self.arrived, strict=False)  # tied weights come once
            self.arrived, self.version = {}, self.version + 1
        return self.version

    def generate(self, prompts, group, length):
        """Return `group` continuations of each prompt, sampled."""
        torch.manual_seed(self.version)
        rows = torch.tensor(prompts).repeat_interleave(group, 0)
        return self.model.generate(
            rows, attention_mask=torch.ones_like(rows), max_new_tokens=length, min_new_tokens=length, do_sample=True
        ).tolist()


def serve(engine, connection):
    while True:
        try:
            name, *arguments = connection.recv()
        except (EOFError, ConnectionError):  # the sender has ended
            os._exit(0)
        try:
            connection.send((True, getattr(engine, name)(*arguments)))
        except Exception as error:
            connection.send((False, f"{name}: {error}"))


if __name__ == "__main__":
    engine = Engine(sys.argv[1])
    with Listener(sys.argv[2], authkey=b"grpo") as listener:
        print("ready", flush=True)
        while True:
            Thread(target=serve, args=(engine, listener.accept()), daemon=True).start()
