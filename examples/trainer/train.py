"""Train a pipeline with the Trainer of transformers: a Trainer on each rank, which believes to be alone.

python examples/sft/make_tiny.py tiny-chat chats
torchrun --standalone --nproc-per-node 2 examples/trainer/train.py tiny-chat chats trained
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

import penstock as ps


class PipelineTrainer(Trainer):
    """All ranks draw the same batches; losses, gradients and norms are those of the whole model."""

    def __init__(self, model, pipeline, args, **options):
        self.whole, self.pipeline = model, pipeline
        part = nn.ParameterList(pipeline.parameters())  # all that Trainer sees of the model
        part.accepts_loss_kwargs, part.loss_type = True, "ForCausalLM"  # so that it counts labels as the loss does
        optimizer = torch.optim.AdamW(part, lr=args.learning_rate, weight_decay=args.weight_decay)
        super().__init__(part, args, optimizers=(optimizer, None), **options)
        self.accelerator.clip_grad_norm_ = lambda parameters, max_norm: pipeline.clip_grad_norm_(max_norm)

    def is_local_process_zero(self):
        return self.pipeline.rank == 0

    def training_step(self, part, inputs, num_items_in_batch=None):
        target = inputs.pop("labels")
        share["of this batch"] = float((target[:, 1:] != -100).sum() / num_items_in_batch)
        loss = self.pipeline.step(**inputs, target=target).loss
        return loss.to(self.args.device) * share["of this batch"]

    def save_model(self, output_dir=None, _internal_call=False):
        self.whole.save_pretrained(self.pipeline, output_dir or self.args.output_dir)


folder, chats, target = sys.argv[1:]
share = {"of this batch": 1.0}
model = ps.from_transformers(folder)
pipeline = ps.Pipeline(model, "1f1b", 2, scale_loss=lambda loss: loss * share["of this batch"], variable_shapes=True)
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
    os.environ.pop(name, None)  # from here on the pipeline alone connects the ranks
tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<|endoftext|>")
lines = [json.loads(line) for file in sorted(Path(chats).glob("*.jsonl")) for line in file.open()]
rows = [tokenizer.apply_chat_template(line["messages"], return_dict=True) for line in lines[:128]]
rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows]
batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "remove_unused_columns": False}
output = {"logging_steps": 5, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
args = TrainingArguments(target, max_steps=20, learning_rate=1e-2, dataloader_pin_memory=False, **batch, **output)
trainer = PipelineTrainer(model, pipeline, args, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer))
trainer.train()
trainer.save_model()
pipeline.close()
