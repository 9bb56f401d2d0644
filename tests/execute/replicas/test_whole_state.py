"""The state of shards comes together on the first replica, and is dealt out from there."""

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


def test_each_replica_gets_its_rows_of_what_the_first_was_given():
    def case(places):
        own, _ = state_on(places)
        given = settle(Scaled(), 9).state_dict() if places.replica == 0 else {}
        rest = deal_out(Control.of(places), own, given)
        return list(rest), {name: local_part(value) for name, value in own.items() if is_dtensor(value)}

    ranks = on_mesh(1, 3, case)

    expected = settle(Scaled(), 9).state_dict()
    assert ranks[0][0] == ["count"]
    assert torch.equal(torch.cat([own["weight"] for _, own in ranks]), expected["weight"])
    assert torch.equal(torch.cat([own["bias"] for _, own in ranks]), expected["bias"])
    assert [own["factor"].item() for _, own in ranks] == [expected["factor"].item()] * 3


def test_shards_that_were_given_are_taken_as_they_are_and_what_is_missing_stays():
    def case(places):
        own, before = state_on(places)
        theirs, _ = state_on(places, seed=9)
        deal_out(Control.of(places), own, {"weight": theirs["weight"]})
        return local_part(own["weight"]).clone(), local_part(own["bias"]).clone(), before["bias"]

    ranks = on_mesh(1, 2, case)

    assert torch.equal(torch.cat([weight for weight, _, _ in ranks]), settle(Scaled(), 9).weight)
    assert torch.equal(torch.cat([bias for _, bias, _ in ranks]), ranks[0][2])
