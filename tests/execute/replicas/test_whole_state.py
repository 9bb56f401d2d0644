"""The state of shards comes together on the first replica, and is dealt out from there."""

import pytest
import torch
from torch import nn

from penstock.execute.control.collectives import Control
from penstock.execute.parameters.gathered import blocks_of
from penstock.execute.replicas.whole_state import WholeState, deal_out, send_rows
from penstock.execute.values.tensors import is_dtensor, local_part
from tests.support.local_pipelines import settle
from tests.support.mesh_pipelines import on_mesh


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(3, 5)
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("count", torch.tensor(7))


def state_on(places, seed=1):
    layer = settle(Scaled(), seed)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    blocks_of([layer], places.mesh)
    return layer.state_dict(), before


def whole_on(places):
    own, before = state_on(places)
    if places.replica > 0:
        send_rows(own, places.data)
        return None, before
    return dict(WholeState(own, places.data).items()), before


def test_the_first_replica_gets_whole_tensors():
    for num_replicas in (1, 2, 4):
        (whole, before), *others = on_mesh(1, num_replicas, whole_on)

        assert whole.keys() == before.keys()
        assert all(torch.equal(whole[name], before[name]) and not is_dtensor(whole[name]) for name in before)
        assert all(each is None for each, _ in others)


@pytest.mark.parametrize("gives_shards", [False, True])
def test_each_replica_gets_its_rows_of_what_the_first_was_given_or_takes_given_shards(gives_shards):
    def case(places):
        own, _ = state_on(places)
        given = settle(Scaled(), 9).state_dict() if places.replica == 0 else {}
        if gives_shards:
            given = {"weight": state_on(places, seed=9)[0]["weight"]}
        rest = deal_out(Control.of(places), own, given)
        return list(rest), {name: local_part(value) for name, value in own.items() if is_dtensor(value)}

    ranks = on_mesh(1, 3, case)

    before, given = settle(Scaled(), 1).state_dict(), settle(Scaled(), 9).state_dict()
    expected = before | {"weight": given["weight"]} if gives_shards else given
    assert ranks[0][0] == ([] if gives_shards else ["count"])
    for name in ("weight", "bias"):
        assert torch.equal(torch.cat([own[name] for _, own in ranks]), expected[name])
    assert [own["factor"].item() for _, own in ranks] == [expected["factor"].item()] * 3
