"""A model and a forward step as users of Megatron-LM write them, and the same in one process."""

import torch
from torch import nn

from tests.support.local_pipelines import settle, values

WIDTH = 6
LENGTH = 3


class Part(nn.Module):
    """One model part: embeds on the first stage, and takes its input by `set_input_tensor` on the others."""

    def __init__(self, stage, num_stages):
        super().__init__()
        self.stage = stage
        self.pre_process = stage == 0
        self.post_process = stage == num_stages - 1
        self.layer = settle(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), 20 + stage)
        self.input_tensor = None

    def set_input_tensor(self, input_tensor):
        assert isinstance(input_tensor, list)
        (self.input_tensor,) = input_tensor

    def forward(self, features):
        hidden = features if self.pre_process else self.input_tensor
        return torch.tanh(self.layer(hidden))


def microbatches(num_microbatches, rows=2):
    """Items as a data iterator gives them; the mask tells which places count."""
    found = []
    for index in range(num_microbatches):
        mask = (values(300 + index, rows, LENGTH) > -0.3).to(torch.float64)
        found.append(
            {
                "features": values(100 + index, rows, LENGTH, WIDTH, dtype=torch.float64),
                "labels": values(200 + index, rows, LENGTH, WIDTH, dtype=torch.float64),
                "mask": mask,
            }
        )
    return found


def squares(output, item):
    """Per place [rows, length]."""
    return ((output - item["labels"]) ** 2).mean(-1)


def forward_step(data_iterator, model):
    item = next(data_iterator) if data_iterator is not None else {"features": None}
    output = model(item["features"])

    def loss_func(output_tensor, non_loss_data=False):
        if non_loss_data:
            return {"logits": output_tensor.detach().clone()}
        loss = squares(output_tensor, item).mean()
        return loss, {"lm loss": loss, "first": item["features"][0, 0, 0]}

    return output, loss_func


def forward_step_per_token(data_iterator, model):
    item = next(data_iterator) if data_iterator is not None else {"features": None}
    output = model(item["features"])

    def loss_func(output_tensor):
        total, num_tokens = (squares(output_tensor, item) * item["mask"]).sum(), item["mask"].sum()
        return total, num_tokens.to(torch.int64), {"lm loss": (total.detach(), num_tokens)}

    return output, loss_func


def count_tokens(item):
    return item["mask"].sum()


def one_process(num_stages, items, loss_of, weights):
    """Train the whole model in one process; return the losses and the gradients by (stage, name)."""
    parts = [Part(stage, num_stages) for stage in range(num_stages)]
    losses = []
    for item, weight in zip(items, weights, strict=True):
        hidden = item["features"]
        for part in parts:
            part.set_input_tensor([hidden])
            hidden = part(item["features"])
        loss = loss_of(hidden, item)
        (loss * weight).backward()
        losses.append(loss.detach())
    found = {(stage, n): p.grad for stage, part in enumerate(parts) for n, p in part.named_parameters()}
    return losses, found
