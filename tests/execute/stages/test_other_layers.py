"""Layers of other ranks are freed, and what would then be wrong without a message is an error."""

import copy
import warnings

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ConfigError, PipelineError
from penstock.execute.stages.other_layers import free_other_layers
from penstock.models.cutting.points import saved_tensors
from tests.support.local_pipelines import error_of, on_ranks
from tests.support.ranks import run_ranks
from tests.support.using import Using

INPUTS, TARGET = torch.arange(32.0).reshape(8, 4).sin(), torch.zeros(8, 4)


def block():
    linear, frozen = nn.Linear(4, 4), nn.Parameter(torch.ones(4), requires_grad=False)
    return Using(
        lambda self, x: self.norm(self.linear(x)) * self.frozen, frozen=frozen, linear=linear, norm=nn.BatchNorm1d(4)
    )


def blocks(number=4):
    torch.manual_seed(0)
    return [block() for _ in range(number)]


def free(layers, own):
    free_other_layers(layers, {index: layers[index] for index in own})


def devices(module):
    return {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}


def test_others_are_on_the_meta_device_and_own_layers_are_as_they_were():
    layers = blocks()
    before = copy.deepcopy(layers[1].state_dict())

    free(layers, [1])

    assert [devices(layer) for layer in layers] == [{"meta"}, {"cpu"}, {"meta"}, {"meta"}]
    assert all(torch.equal(value, before[name]) for name, value in layers[1].state_dict().items())
    assert [parameter.requires_grad for parameter in layers[0].parameters()] == [False, True, True, True, True]


def test_what_own_layers_use_too_stays_and_what_others_share_they_go_on_sharing():
    first, shared, other, third, fourth = (nn.Linear(4, 4) for _ in range(5))
    other.weight, fourth.weight = first.weight, third.weight
    layers = [nn.Sequential(first, shared), nn.Sequential(shared, other), shared, third, fourth]
    lazy = nn.LazyLinear(4)

    free([*layers, lambda: nn.Linear(4, 4), lazy], [0])  # there is nothing of builders and lazy layers to free

    assert devices(shared) == {"cpu"}
    assert other.weight is first.weight
    assert other.bias.is_meta
    assert fourth.weight is third.weight
    assert fourth.weight.is_meta
    assert isinstance(lazy.weight, nn.UninitializedParameter)


def test_the_state_of_a_model_that_was_cut_is_refused_on_one_rank_and_it_can_be_cut_again():
    model = nn.Module()
    model.blocks = nn.Sequential(*blocks())
    model.forward = lambda hidden: model.blocks(hidden)
    state, tensors = copy.deepcopy(model.state_dict()), saved_tensors(model)
    free(ps.cut(model, ["blocks.*"]), [1])

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
    free(layers, own)
    for index in own:
        layers[index](INPUTS).sum().backward()

    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        nn.utils.clip_grad_norm_(nn.Sequential(*layers).parameters(), 1.0, foreach=foreach)


def test_ranks_that_are_threads_share_the_layers_and_free_none():
    def case(wires, **options):
        return ps.Pipeline(layers, "1f1b", 4, nn.functional.mse_loss, transport=wires, **options)

    layers = blocks()
    on_ranks(2, case)
    assert [devices(layer) for layer in layers] == [{"cpu"}] * 4
    assert str(on_ranks(2, lambda wires: error_of(case, wires, frees_other_stages=True))[1]) == (
        "frees_other_stages: the ranks are threads of one process and share the layers, so none can be freed; leave it "
        "out"
    )


def train(rank, frees):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said of builders
        ps.Pipeline([ps.LayerSpec(str(n), block) for n in range(4)], "1f1b", 4, nn.functional.mse_loss).close()
    layers = blocks()
    early_optimizer = torch.optim.SGD(nn.Sequential(*layers).parameters(), lr=0.1)
    wrong = {"tied": [("0.frozen", "3.frozen")], "reduce_stage": (lambda stage: None) if rank else None}
    error = error_of(ps.Pipeline, layers, "1f1b", 4, nn.functional.mse_loss, **wrong)
    assert isinstance(error, PipelineError)
    assert [devices(layer) for layer in layers] == [{"cpu"}] * 4  # a construction that fails frees nothing
    first_weight = layers[2 * rank].linear.weight.clone()
    pipeline = ps.Pipeline(layers, "1f1b", 4, nn.functional.mse_loss, frees_other_stages=frees)
    for _ in range(2):
        loss = pipeline.step(INPUTS, target=TARGET).loss.item()
        pipeline.clip_grad_norm_(1.0)
        early_optimizer.step()
    evaluated = pipeline.evaluate(INPUTS, target=TARGET).loss.item()
    state = pipeline.state_dict(on_rank=0)
    gradients = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    again = frees is None and str(error_of(ps.Pipeline, layers, "gpipe", 4, nn.functional.mse_loss, split=[3, 1]))
    pipeline.close()
    assert not torch.equal(layers[2 * rank].linear.weight, first_weight)  # the early optimizer trains it
    return loss, evaluated, state, gradients, [devices(layer) for layer in layers], again


@pytest.mark.slow
def test_a_pipeline_frees_and_trains_to_the_bits_of_one_that_keeps_other_layers():
    freeing, keeping = (run_ranks(2, train, frees) for frees in (None, False))

    for rank in range(2):
        assert freeing[rank][:2] == keeping[rank][:2]
        for freeing_values, keeping_values in zip(freeing[rank][2:4], keeping[rank][2:4], strict=True):
            assert freeing_values.keys() == keeping_values.keys()
            for name, value in freeing_values.items():
                assert value is keeping_values[name] is None or torch.equal(value, keeping_values[name])
        assert keeping[rank][4] == [{"cpu"}] * 4
    assert freeing[0][4] == [{"cpu"}, {"cpu"}, {"meta"}, {"meta"}]
    assert freeing[1][4] == [{"meta"}, {"meta"}, {"cpu"}, {"cpu"}]
    assert "is on the meta device" in freeing[0][5]
