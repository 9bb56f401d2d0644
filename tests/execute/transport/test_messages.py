"""Messages between stages: shapes agreed once, checked before they are sent, received in the order of the channel."""

import math

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.transport import Ticket
from penstock.execute.transport.agreed_layouts import MAX_LAYOUTS
from penstock.execute.transport.device_queue import DeviceQueue
from penstock.execute.transport.messages import Messenger
from tests.support.local_pipelines import assert_errors, error_of, on_ranks, values

CPU = torch.device("cpu")
FIRST, SECOND = (1, 0, 0), (1, 1, 0)


class Counting:
    """Passes everything on to a transport and counts the messages that are posted."""

    def __init__(self, transport):
        self._transport = transport
        self.rank, self.num_ranks = transport.rank, transport.num_ranks
        self.num_messages = 0

    def post_send(self, peer, tensor):
        self.num_messages += 1
        return self._transport.post_send(peer, tensor)

    def post_receive(self, peer, tensor):
        self.num_messages += 1
        return self._transport.post_receive(peer, tensor)

    def wait(self, ticket):
        self._transport.wait(ticket)


class LeavingAtOnce(Counting):
    """Says of every message that it has left, and counts the sends that are waited for nevertheless."""

    num_waits = 0

    def post_send(self, peer, tensor):
        self._transport.post_send(peer, tensor)
        return Ticket(peer, True, self.num_messages, is_over=True)

    def wait(self, ticket):
        self.num_waits += ticket.is_send
        super().wait(ticket)


def send_all(messenger, trees, signature="batch", **options):
    messenger.begin(signature, **options)
    for key, tree in trees.items():
        messenger.layouts.note_outputs(key, tree, f"{key[0] - 1}F{key[1]}")
        messenger.sender.send_forward(1, key, tree)
    messenger.finish()


def receive_all(messenger, keys, signature="batch", **options):
    messenger.begin(signature, **options)
    posted = [messenger.receiver.post_forward(0, key) for key in keys]
    found = [messenger.receiver.take_tree(incoming) for incoming in posted]
    messenger.finish()
    return found


def run_step(messenger, trees, *how, **options):
    """Send trees from rank 0 to rank 1; return what arrived and how many messages it took."""
    transport = messenger.transport
    before = transport.num_messages
    found = (receive_all if transport.rank else send_all)(messenger, trees, *how, **options)
    return found, transport.num_messages - before


def exchange(wires, steps, **options):
    """Send each step's trees from rank 0 to rank 1; return what arrived and how many messages it took."""
    messenger = Messenger(Counting(wires), CPU, **options)
    return zip(*[run_step(messenger, trees) for trees in steps], strict=True)


def there_and_back(messenger, outputs, gradients):
    """Rank 0 sends outputs and gets their gradients, rank 1 the other way round; return what came."""
    messenger.begin("layout")
    if messenger.transport.rank == 0:
        messenger.layouts.note_outputs(FIRST, outputs, "0F0")
        messenger.sender.send_forward(1, FIRST, outputs)
        found = messenger.receiver.take_gradients(messenger.receiver.post_backward(1, FIRST))
    else:
        found = messenger.receiver.take_tree(messenger.receiver.post_forward(0, FIRST))
        messenger.sender.send_backward(0, gradients, FIRST)
    messenger.finish()
    return found


@pytest.mark.feature("0.16", "C11", "X33")
@pytest.mark.parametrize(
    ("options", "rows", "counts"),
    [({}, (2, 2, 2), (3, 1, 1)), ({"has_variable_shapes": True}, (2, 4, 1), (3, 3, 3))],  # length, header, tensor
    ids=["one layout", "variable shapes"],
)
def test_the_first_message_of_a_layout_and_all_of_variable_shapes_have_headers(options, rows, counts):
    steps = [{FIRST: values(step, number, 3)} for step, number in enumerate(rows)]

    (_, sent), (found, received) = on_ranks(2, lambda wires: exchange(wires, steps, **options))

    assert sent == received == counts
    assert all(torch.equal(trees[0], step[FIRST]) for trees, step in zip(found, steps, strict=True))


def test_the_layouts_that_ran_last_are_remembered_and_the_others_let_go():
    def case(wires):
        messenger, counts = Messenger(Counting(wires), CPU), {}
        for signature in ["kept", "lost", *map(str, range(MAX_LAYOUTS - 2)), "kept", "new", "kept", "lost", "new"]:
            _, num_messages = run_step(messenger, {FIRST: values(0, 2)}, signature)
            counts.setdefault(signature, []).append(num_messages)
        return counts

    counts, _ = on_ranks(2, case)

    assert (counts["kept"], counts["new"], counts["lost"]) == ([3, 1, 1], [3, 1], [3, 3])


@pytest.mark.feature("X34")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]
)
def test_tensors_arrive_with_type_shape_and_need_of_gradient(dtype):
    tensor = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype)
    needs_gradient = dtype.is_floating_point
    tree = {"empty": tensor[:0], "x": tensor.requires_grad_(needs_gradient), "scalar": torch.tensor(3), "none": None}
    tree["parameter"] = torch.nn.Parameter(torch.eye(2))

    (_, _), (found, _) = on_ranks(2, exchange, [{FIRST: tree}, {FIRST: tree}])

    for (received,) in found:
        assert list(received) == list(tree)
        torch.testing.assert_close(received, tree, rtol=0, atol=0)
        assert (received["x"].requires_grad, received["x"].is_leaf) == (needs_gradient, True)
        assert type(received["parameter"]) is torch.Tensor


@pytest.mark.parametrize("options", [{}, {"has_variable_shapes": True}])
def test_plain_numbers_arrive_as_they_are_in_each_message(options):
    numbers = [0.5, math.nan, -1e-300]
    trees = [{"x": values(k, 2, 3), "n": number, "k": k, "odd": k % 2 == 1} for k, number in enumerate(numbers)]
    steps = [{FIRST: tree, SECOND: tree["n"]} for tree in trees]

    (_, sent), (found, received) = on_ranks(2, lambda wires: exchange(wires, steps, **options))

    assert sent == received
    for expected, (tree, alone) in zip(trees, found, strict=True):
        assert torch.equal(tree.pop("x"), expected.pop("x"))
        assert repr(tree) == repr(expected)
        assert repr(alone) == repr(expected["n"])


@pytest.mark.parametrize("num_steps", [1, 2])
def test_dimensions_lie_in_memory_at_both_ends_as_they_did_first(num_steps):
    """Pictures with channels last; those of the second step are written plainly, and arrive like the first."""
    pictures = values(1, 2, 3, 4, 5)
    last = pictures.to(memory_format=torch.channels_last).requires_grad_()
    gradient = values(2, 2, 3, 4, 5)

    def case(wires):
        messenger = Messenger(wires, CPU)
        for sent in (last, pictures.clone().requires_grad_())[:num_steps]:
            found = there_and_back(messenger, sent, [gradient])
        return found[0] if wires.rank == 0 else found.detach()

    for received, wanted in zip(on_ranks(2, case), (gradient, pictures), strict=True):
        assert torch.equal(received, wanted)
        assert received.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.feature("C16")
@pytest.mark.parametrize("num_steps", [1, 2])
def test_gradients_come_back_for_the_tensors_that_need_them(num_steps):
    outputs = (values(0, 2, 3).requires_grad_(), torch.arange(4), values(1, 5).requires_grad_())
    gradients = [values(7, 2, 3), values(8, 5)]

    def case(wires):
        messenger = Messenger(wires, CPU)
        return [there_and_back(messenger, outputs, gradients) for _ in range(num_steps)]

    found, _ = on_ranks(2, case)

    assert all(map(torch.equal, found[-1], gradients))


@pytest.mark.feature("C12")
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (values(0, 3, 3), "float32[3, 3]"),
        (values(0, 2, 3, dtype=torch.float64), "float64[2, 3]"),
        ((values(0, 2, 3),), "(*,)"),
        (5, "with 5"),
        (values(0, 2, 3).requires_grad_(), "that needs a gradient"),
    ],
    ids=["shape", "type", "tree", "value", "gradient"],
)
def test_an_output_that_differs_from_what_was_agreed_is_not_sent(changed, text):
    error, num_sent = refusal(values(0, 2, 3), changed)

    assert (error.rank, error.instruction, num_sent) == (0, "0F0", 0)
    assert_errors([error], PipelineError, "0F0: the output is ", text, "float32[2, 3]", "variable_shapes=True")


def refusal(agreed, changed):
    """Return why a second output is not sent, and how many messages it has taken."""

    def case(wires):
        messenger = Messenger(Counting(wires), CPU)
        run_step(messenger, {FIRST: agreed})
        before = messenger.transport.num_messages
        error = error_of(send_all, messenger, {FIRST: changed}) if wires.rank == 0 else None
        return error, messenger.transport.num_messages - before

    return on_ranks(2, case)[0]


class Scaled(torch.Tensor):
    """A tensor that another rank would take for a plain one."""


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (torch.eye(2).to_sparse(), "is a tensor of layout torch.sparse_coo"),
        (torch.eye(2).as_subclass(Scaled), "test_messages.Scaled, a subclass of tensors"),
    ],
)
def test_a_tensor_that_is_of_another_kind_than_what_was_agreed_is_not_sent(changed, text):
    assert_errors([refusal(torch.eye(2), changed)[0]], PipelineError, text)


def test_after_a_reset_everything_is_agreed_anew():
    def case(wires):
        messenger = Messenger(Counting(wires), CPU)
        for rows in (2, 4):
            run_step(messenger, {FIRST: values(0, rows)})
            messenger.reset()
        return messenger.transport.num_messages

    assert on_ranks(2, case) == [6, 6]


def test_what_has_left_at_once_is_not_waited_for():
    def case(wires):
        transport = LeavingAtOnce(wires)
        return run_step(Messenger(transport, CPU), trees)[0], transport.num_waits

    trees = {FIRST: values(0, 2), SECOND: values(1, 3)}
    (_, num_waits), (found, _) = on_ranks(2, case)

    assert num_waits == 0
    assert all(map(torch.equal, found, trees.values()))


@pytest.mark.parametrize("has_left", [False, True])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_an_output_that_is_changed_while_it_is_on_its_way_is_told_with_its_stage(has_left, needs_gradient):
    """A parameter, which needs a gradient, may be changed by the optimizer before this rank knows that it arrived."""
    output = values(0, 2).requires_grad_(needs_gradient)

    def case(wires):
        if wires.rank == 1:
            return receive_all(Messenger(wires, CPU), [(3, 2, 0)])
        messenger = Messenger(LeavingAtOnce(wires) if has_left else wires, CPU)
        messenger.begin("batch")
        messenger.layouts.note_outputs((2, 2, 0), output, "2F2")
        messenger.sender.send_forward(1, (2, 2, 0), output)
        with torch.no_grad():
            output.add_(1)
        if has_left or needs_gradient:
            return messenger.finish()
        return str(error_of(messenger.finish))

    message, _ = on_ranks(2, case)

    text = "stage 2, microbatch 2: a tensor of its output was changed in place"
    assert message is None if has_left or needs_gradient else message.startswith(text)


def test_a_described_message_needs_no_agreement_and_leaves_none_behind():
    trees = [{"y": values(1, 2, 3), "n": 7}, (values(2, 4), None)]

    def case(wires):
        messenger = Messenger(Counting(wires), CPU)
        run_step(messenger, {FIRST: values(0, 2)})  # later ones have no header
        messenger.begin("batch")
        found = []
        for tree in trees:
            if wires.rank == 0:
                messenger.sender.send_described(1, tree)
            else:
                found.append(messenger.receiver.receive_described(0))
        messenger.finish()
        return found

    first, second = on_ranks(2, case)[1]

    torch.testing.assert_close(first, trees[0], rtol=0, atol=0)
    assert torch.equal(second[0], trees[1][0])
    assert second[1] is None


class OnADevice(Counting):
    """Says that its messages are in a device's queue; those of `left` have left."""

    def __init__(self, transport):
        super().__init__(transport)
        self.followed, self.waited, self.left = [], [], set()
        self.device_queue = QueueStandIn(self, {}, None)

    def wait(self, ticket):
        self.waited.append(ticket.serial)
        self._transport.wait(ticket)


class QueueStandIn(DeviceQueue):
    def follow(self, ticket):
        self._transport.followed.append(ticket.serial)
        self._transport._transport.wait(ticket)

    def has_left(self, ticket):
        return ticket.serial in self._transport.left

    def settle(self):
        self._transport.waited.append("settled")


def test_a_device_waits_for_tensors_and_the_host_for_the_numbers_that_it_reads():
    tree = {"x": values(0, 2, 3), "scale": 0.5}

    def case(wires):
        device = OnADevice(wires)
        messenger = Messenger(device, CPU)
        for _ in range(2):
            device.followed, device.waited = [], []
            found, _ = run_step(messenger, {FIRST: tree}, follows=True)
        if wires.rank == 1:
            torch.testing.assert_close(found, [tree], rtol=0, atol=0)
        return len(device.followed), device.waited.index("settled"), len(device.waited)

    (sender, receiver) = on_ranks(2, case)

    assert sender == (0, 0, 3)  # settled before the host waits for what it has sent: the scale and the tensor
    assert receiver == (1, 1, 2)  # the host has waited for the scale alone


def test_where_a_device_follows_only_what_has_left_is_released():
    trees = {FIRST: values(0, 2), SECOND: [values(1, 2), values(2, 2)]}

    def case(wires):
        device = OnADevice(wires)
        messenger = Messenger(device, CPU)
        if wires.rank == 1:
            return [receive_all(messenger, list(trees)) for _ in range(2)]
        send_all(messenger, trees)
        messenger.begin("batch", follows=True)
        for key, tree in trees.items():
            messenger.layouts.note_outputs(key, tree, "0F")
            messenger.sender.send_forward(1, key, tree)
        first, second, third = [each.serial for one in messenger.sender._leaving[1] for each in one.tickets]
        device.waited, counts = [], []
        for left in ({second, third}, {first, third}, {first, second, third}):
            device.left = left
            messenger.sender.release(1, 2)
            counts.append(len(device.waited))
        messenger.finish()
        return counts, len(device.waited)

    (counts, num_waited), _ = on_ranks(2, case)

    assert counts == [0, 1, 3]  # the first holds up the second, whose two tensors must both have left
    assert num_waited == 4  # with the settling
