"""A pipeline that splits nothing: each rank runs the whole model. What judges a cut model must find it right."""

from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_map


def together(*tensors):
    """Return the rows of all microbatches; a scalar is that of the first one."""
    return torch.cat(tensors) if tensors[0].dim() else tensors[0]


class UnsplitPipeline:
    """The calls of `ps.Pipeline` that tests of cut models make, by a model in one piece."""

    def __init__(self, model, course, transport):
        self.model, self.course = model, course

    def step(self, *, target, return_outputs, **keywords):
        self.model.train()
        return self._run(keywords, target, True)

    def evaluate(self, *, target, return_outputs, **keywords):
        self.model.eval()
        with torch.no_grad():
            result = self._run(keywords, target, False)
        self.model.train()
        return result

    def _run(self, keywords, target, is_training):
        number, losses, outputs = self.course.num_microbatches, [], []
        for index, rows in enumerate(target.chunk(number)):
            batch = {n: t.chunk(number)[index] if isinstance(t, torch.Tensor) else t for n, t in keywords.items()}
            output = self.model(**batch)
            loss = self.course.loss(output, rows)
            if is_training:
                (loss / number).backward()
            losses.append(loss.detach())
            outputs.append(output)
        return SimpleNamespace(losses=losses, outputs=tree_map(together, *outputs))

    def named_parameters(self):
        return self.model.named_parameters()

    def parameters(self):
        return self.model.parameters()

    def state_dict(self):
        return self.model.state_dict()

    def close(self): ...
