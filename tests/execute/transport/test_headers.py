"""A header describes a tree of tensors by itself."""

import torch

from penstock.execute.transport.headers import header_of, receive_header, stored_tensors, tensors_of
from tests.support.local_pipelines import on_ranks

TREE = {"hidden": torch.ones(2, 3).t(), "step": 4, "mask": None}


def test_a_header_says_the_layout_of_a_tree_with_its_numbers():
    def case(transport):
        if transport.rank == 0:
            for part in header_of(TREE):
                transport.wait(transport.post_send(1, part))
            return None
        layout = receive_header(transport, 0, torch.device("cpu"))
        return layout.fill([torch.zeros(info.shape) for info in layout.tensors])

    _, tree = on_ranks(2, case)

    assert tree["hidden"].shape == (3, 2)
    assert (tree["step"], tree["mask"]) == (4, None)


def test_tensors_are_sent_as_they_lie_in_memory():
    (stored,) = stored_tensors(TREE)

    assert stored.is_contiguous()
    assert stored.data_ptr() == TREE["hidden"].data_ptr()
    assert tensors_of([1, TREE["hidden"], None]) == [TREE["hidden"]]
