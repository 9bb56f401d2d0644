"""Layers of other ranks are freed on request, and what would then be wrong without a message is an error."""

import copy
import warnings

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ConfigError, PenstockWarning
from penstock.execute.stages.other_layers import OtherLayers
from penstock.models.cutting.points import saved_tensors
from tests.local_pipelines import error_of, on_ranks
from tests.ranks import run_ranks

INPUTS, TARGET = torch.ones(8, 4), torch.zeros(8, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, hidden):
        return self.norm(self.linear(hidden)) * self.frozen


def blocks(number=4):
    torch.manual_seed(0)
    return [Block() for _ in range(number)]


def freed(layers, own):
    others = OtherLayers(layers, list(map(str, range(len(layers)))), {index: layers[index] for index in own})
    others.free()
    return others


def devices(module):
    return {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}


def test_others_are_on_the_meta_device_and_own_layers_are_as_they_were():
    layers = blocks()
    before = copy.deepcopy(layers[1].state_dict())

    others = freed(layers, [1])

    assert [devices(layer) for layer in layers] == [{"meta"}, {"cpu"}, {"meta"}, {"meta"}]
    assert all(torch.equal(value, before[name]) for name, value in layers[1].state_dict().items())
    assert [parameter.requires_grad for parameter in layers[0].parameters()] == [False, True, True, True, True]
    assert others.num_parameters() == 0


def test_what_own_layers_use_too_stays():
    first, shared, other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = first.weight
    layers = [nn.Sequential(first, shared), nn.Sequential(shared, other), shared]

    others = OtherLayers(layers, ["0", "1", "2"], {0: layers[0]})
    assert others.num_parameters() == 4
    others.free()

    assert devices(shared) == {"cpu"}
    assert other.weight is first.weight
    assert other.bias.is_meta


def test_what_others_share_they_go_on_sharing():
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[2].weight = layers[1].weight

    others = OtherLayers(layers, ["0", "1", "2"], {0: layers[0]})
    assert others.num_parameters() == 16 + 4 + 4
    others.free()

    assert layers[2].weight is layers[1].weight


def test_builders_and_lazy_layers_have_nothing_to_free():
    layers = [nn.Linear(4, 4), lambda: nn.Linear(4, 4), nn.LazyLinear(4)]

    assert freed(layers, [0]).num_parameters() == 0


def test_the_state_of_the_whole_model_is_refused_on_one_rank():
    layers = blocks()
    model = nn.Sequential(*layers)
    state = copy.deepcopy(model.state_dict())
    freed(layers, [1])

    for take in (model.state_dict, lambda: nn.ModuleDict({"body": model}).state_dict()):
        with pytest.raises(
            ConfigError, match=r"layer at '(body\.)?0' is another rank's.*pipeline.state_dict\(on_rank=0\)"
        ):
            take()
    with pytest.raises(ConfigError, match=r"the layer at '0' .* Call pipeline\.load_state_dict\(state\)"):
        model.load_state_dict(state)
    assert layers[1].state_dict()


def test_the_state_of_a_model_that_was_cut_is_refused_on_one_rank_and_it_can_be_cut_again():
    model = nn.Module()
    model.blocks = nn.Sequential(*blocks())
    model.forward = lambda hidden: model.blocks(hidden)
    state, tensors = copy.deepcopy(model.state_dict()), saved_tensors(model)
    freed(ps.cut(model, ["blocks.*"]), [1])

    with pytest.raises(ConfigError, match=r"layer at 'blocks\.0' is another rank's.*pipeline.state_dict\(on_rank=0\)"):
        model.state_dict()
    with pytest.raises(ConfigError, match=r"the layer at 'blocks\.0' .* Call pipeline\.load_state_dict\(state\)"):
        model.load_state_dict(state)
    assert model.blocks[1].state_dict().keys() == dict(blocks()[1].state_dict()).keys()
    assert list(saved_tensors(model)) == list(tensors) == list(state)
    assert len(ps.cut(model, ["blocks.*"])) == 4


@pytest.mark.parametrize("own", [[0, 1], [2, 3]])
@pytest.mark.parametrize("foreach", [None, False])
def test_torchs_clipping_over_the_whole_model_is_an_error_on_every_rank(own, foreach):
    layers = blocks()
    freed(layers, own)
    for index in own:
        layers[index](INPUTS).sum().backward()

    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        nn.utils.clip_grad_norm_(nn.Sequential(*layers).parameters(), 1.0, foreach=foreach)


def test_ranks_that_are_threads_share_the_layers_and_free_none():
    def case(wires):
        return error_of(ps.Pipeline, blocks(), "1f1b", 4, nn.functional.mse_loss, transport=wires, **FREES)

    assert str(on_ranks(2, case)[1]) == (
        "frees_other_stages: the ranks are threads of one process and share the layers, so none can be freed; leave it "
        "out"
    )


FREES = {"frees_other_stages": True}


def train(rank, frees):
    layers = blocks()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = ps.Pipeline(layers, "1f1b", 4, nn.functional.mse_loss, frees_other_stages=frees)
    for _ in range(2):
        loss = pipeline.step(INPUTS, target=TARGET).loss.item()
        pipeline.clip_grad_norm_(1.0)
    evaluated = pipeline.evaluate(INPUTS, target=TARGET).loss.item()
    state = pipeline.state_dict(on_rank=0)
    gradients = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    again = frees and str(error_of(ps.Pipeline, layers, "gpipe", 4, nn.functional.mse_loss, split=[3, 1]))
    told = [(str(each.message), each.filename) for each in caught if each.category is PenstockWarning]
    pipeline.close()
    return loss, evaluated, state, gradients, [devices(layer) for layer in layers], told, again


@pytest.mark.slow
def test_a_pipeline_that_frees_trains_to_the_same_bits_and_the_default_is_warned_of_once():
    kept, freeing, silent = (run_ranks(2, train, frees) for frees in (None, True, False))

    for rank in range(2):
        for other in (freeing, silent):
            assert other[rank][:2] == kept[rank][:2]
            for mine, theirs in zip(other[rank][2:4], kept[rank][2:4], strict=True):
                assert mine.keys() == theirs.keys()
                assert all(torch.equal(mine[name], theirs[name]) for name in mine if mine[name] is not None)
    assert freeing[0][4] == [{"cpu"}, {"cpu"}, {"meta"}, {"meta"}]
    assert freeing[1][4] == [{"meta"}, {"meta"}, {"cpu"}, {"cpu"}]
    assert "is on the meta device" in freeing[0][6]
    assert [len(told) for *_, told, _ in (*kept, *freeing, *silent)] == [1, 0, 0, 0, 0, 0]
    ((message, filename),) = kept[0][5]
    assert message.startswith("every rank keeps the whole model: on rank 0, 64 parameters are of other ranks' layers")
    assert filename == __file__


def made_of_builders(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specs = [ps.LayerSpec(str(number), Block) for number in range(4)]
        ps.Pipeline(specs, "1f1b", 4, nn.functional.mse_loss).close()


@pytest.mark.slow
def test_builders_are_not_warned_of():
    run_ranks(2, made_of_builders)
