"""Trees are taken apart and made anew in one order."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch

from penstock.models.cutting.trees import items_in, map_items, map_tensors, tensors_in

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Output:
    hidden: torch.Tensor
    number: int = 3


ONE, TWO = torch.ones(1), torch.full((1,), 2.0)


def test_containers_keep_their_classes_and_items_their_order():
    tree = [Pair(ONE, (TWO, "text")), OrderedDict(a=Output(ONE)), None]

    doubled = map_tensors(lambda tensor: tensor * 2, tree)

    assert [tensor.item() for tensor in tensors_in(doubled)] == [2, 4, 2]
    assert isinstance(doubled[0], Pair)
    assert isinstance(doubled[1], OrderedDict)
    assert doubled[1]["a"] == Output(doubled[1]["a"].hidden)
    assert doubled[1] is not tree[1]
    assert list(items_in(tree)) == [ONE, TWO, "text", ONE, 3, None]
    assert map_items(type, (1, "a")) == (int, str)
