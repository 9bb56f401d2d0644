"""What the host has of a batch goes to the device, and trains as what was there."""

import pytest
import torch
from torch import nn

from penstock import BatchSpec, Part, PreSplit, Replicate, Stream
from penstock.execute.batch import host_to_device
from penstock.execute.batch.host_to_device import copies_for, pinned_or_copied
from penstock.execute.batch.needs import InputNeeds
from penstock.pipeline import Pipeline

ROWS, WIDTH, NUM_MICROBATCHES, NUM_STEPS = 8, 4, 4, 3


class Shifted(nn.Module):
    """Adds a table, and hides what a mask hides."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, *, table, mask):
        return torch.tanh(self.layer(hidden + table)) * mask


class Pair(nn.Module):
    """Joins two inputs; the second is a number or a tensor."""

    def forward(self, values, factor):
        return values * factor


def batches_of(form, place):
    """Make the arguments of each step, whose tensors `place` puts where they are to be."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(NUM_STEPS):
        draw = [place(torch.randn(ROWS, WIDTH, generator=generator)) for _ in range(3)]
        table, number = place(torch.randn(WIDTH, generator=generator)), place(torch.tensor(0.5))
        inputs, target, mask = draw
        keywords = {"mask": mask, "table": table}
        if form == "pre-split":
            inputs, mask = (PreSplit(list(each.chunk(NUM_MICROBATCHES))) for each in (inputs, mask))
            keywords = {"mask": mask, "table": PreSplit([table] * NUM_MICROBATCHES)}
            number = PreSplit([number] * NUM_MICROBATCHES)
        if form == "consumed":
            inputs = PreSplit(list(inputs.chunk(NUM_MICROBATCHES)), is_consumed=True)
        if form == "transposed":
            inputs = inputs.t().contiguous().t()
        yield (inputs, number), keywords, target


def stream_of(place):
    """Yield all microbatches of all steps in the same tensors, which are filled again for each."""
    buffers = {}
    for args, keywords, target in batches_of("whole", lambda tensor: tensor):
        table = keywords["table"]
        pieces = (each.chunk(NUM_MICROBATCHES) for each in (args[0], keywords["mask"], target))
        for inputs, mask, labels in zip(*pieces, strict=True):
            made = {"inputs": inputs, "mask": mask, "labels": labels, "table": table, "number": args[1]}
            for name, tensor in made.items():
                if name not in buffers:
                    buffers[name] = place(torch.empty_like(tensor))
                buffers[name].copy_(tensor)
            own = buffers
            yield Part(own["inputs"], own["number"], mask=own["mask"], table=own["table"], target=own["labels"])


def trained(device, form, place):
    """Train, and return losses and weights as they are on the host."""
    torch.manual_seed(0)
    pipeline = Pipeline(
        [Pair(), Shifted(), nn.Linear(WIDTH, WIDTH)], "gpipe", NUM_MICROBATCHES, nn.functional.mse_loss,
        device=device, specs=BatchSpec(kwargs={"table": Replicate()}),
    )  # fmt: skip
    losses = []
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    stream = Stream(stream_of(place)) if form == "stream" else None
    for args, keywords, target in batches_of(form, place):
        if stream is not None:
            args, keywords, target = (stream,), {}, None
        losses.append(pipeline.step(*args, target=target, **keywords).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [parameter.detach().cpu() for parameter in pipeline.parameters()]


def host_batches_train_as_those_of_the_device(device, form, is_pinned):
    def on_host(tensor):
        return tensor.pin_memory() if is_pinned else tensor

    losses, weights = trained(device, form, on_host)
    expected, expected_weights = trained(device, form, lambda tensor: tensor.to(device))

    assert losses == expected
    assert all(map(torch.equal, weights, expected_weights))


@pytest.mark.feature("H1")
@pytest.mark.parametrize("is_pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("form", ["whole", "pre-split", "consumed", "transposed", "stream"])
def test_batches_in_the_memory_of_the_host_train_as_those_of_the_device(on_device, form, is_pinned):
    on_device(host_batches_train_as_those_of_the_device, form, is_pinned)


def gradients_and_evaluations(device):
    """An input that needs a gradient gets it on the host; a pinned batch is the caller's again behind an evaluation."""
    torch.manual_seed(0)
    pipeline = Pipeline([nn.Linear(WIDTH, WIDTH)], "gpipe", 2, nn.functional.mse_loss, device=device)
    leaves = [torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).requires_grad_() for _ in range(2)]
    for leaf, place in zip(leaves, (device, "cpu"), strict=True):
        pipeline.step(leaf.to(place), target=torch.zeros(ROWS, WIDTH, device=place))
    assert torch.equal(*(leaf.grad for leaf in leaves))

    inputs = torch.randn(ROWS, WIDTH).pin_memory()
    expected = pipeline.evaluate(inputs.to(device), return_outputs=True).outputs
    outputs = pipeline.evaluate(inputs, return_outputs=True).outputs
    inputs.zero_()
    assert torch.equal(outputs, expected)


def test_inputs_get_their_gradients_on_the_host_and_pinned_ones_are_the_callers_again_behind_an_evaluation(on_device):
    on_device(gradients_and_evaluations)


def copies_without_streams(device):
    """Train where no stream is beside the current one."""
    losses, _ = trained(device, "whole", lambda tensor: tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_to_device, "make_stream", lambda device: None)
        assert trained(device, "whole", torch.Tensor.pin_memory)[0] == losses
        assert trained(device, "stream", lambda tensor: tensor)[0] == losses


def test_a_device_without_further_streams_copies_by_the_current_one(on_device):
    on_device(copies_without_streams)


def test_stages_on_the_cpu_have_nothing_that_copies():
    needs = [InputNeeds(True, True, device=device) for device in (None, torch.device("cpu"))]

    assert [copies_for(None, each, None) for each in needs] == [None, None]


def takes_over_what_a_stream_brings(device):
    leaf = torch.ones(2, requires_grad=True)
    values = torch.arange(6.0).reshape(2, 3).t()

    copy = pinned_or_copied(values)

    assert torch.equal(copy, values)
    assert (copy.is_pinned(), copy.stride()) == (True, values.stride())
    assert pinned_or_copied(leaf) is leaf
    assert pinned_or_copied("text") == "text"
    assert pinned_or_copied(torch.ones(2, device=device)).device.type == device.type


def test_what_a_stream_brings_is_copied_once_on_the_host_to_pinned_memory(on_device):
    on_device(takes_over_what_a_stream_brings)
