"""Transformers of diffusers train in parts as by themselves: blocks of two kinds, one of which hands on pairs.

Needs diffusers, which no extra installs: `pip install diffusers`.
"""

import copy

import pytest
import torch

import penstock as ps
from tests.support.local_pipelines import on_ranks

diffusers = pytest.importorskip("diffusers")
WIDTH = {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 12}


def flux():
    """Return a model, a batch, and the arguments that have no rows."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=8, num_layers=3, num_single_layers=3, axes_dims_rope=(2, 2, 4), **WIDTH
    )
    places = {"img_ids": torch.randn(6, 3), "txt_ids": torch.zeros(5, 3)}
    return model, {"hidden_states": torch.randn(4, 6, 8), "timestep": torch.rand(4), **places}, tuple(places)


def sd3():
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        num_layers=4,
        caption_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
        **WIDTH,
    )
    return model, {"hidden_states": torch.randn(4, 4, 8, 8), "timestep": torch.rand(4) * 1000}, ()


POINTS = {flux: ["transformer_blocks.*", "single_transformer_blocks.*", "norm_out", "proj_out"]}
POINTS[sd3] = ["transformer_blocks.*", "norm_out", "proj_out"]


def loss_of(output, target):
    sample = output[0] if isinstance(output, tuple) else output.sample
    return (sample - target).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "num_ranks"), [("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("interleaved-1f1b", 2), ("zbv", 2)]
)
@pytest.mark.parametrize("make", [flux, sd3])
def test_gradients_are_those_of_the_model_itself(make, schedule, num_ranks):
    torch.manual_seed(0)
    model, batch, whole_names = make()
    model.double()
    batch |= {"encoder_hidden_states": torch.randn(4, 5, 16), "pooled_projections": torch.randn(4, 12)}
    batch = {name: value.double() for name, value in batch.items()}
    with torch.no_grad():  # first values of some layers are zeros, behind which nothing would have a gradient
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    one_process = copy.deepcopy(model)
    target = torch.randn_like(one_process(**batch).sample)
    for rows in (slice(0, 2), slice(2, 4)):
        part = {name: value if name in whole_names else value[rows] for name, value in batch.items()}
        (loss_of(one_process(**part), target[rows]) / 2).backward()
    wanted = {name: parameter.grad for name, parameter in one_process.named_parameters()}

    def train(transport):
        specs = ps.BatchSpec(kwargs={name: ps.Replicate() for name in whole_names}) if whole_names else None
        layers = ps.cut(copy.deepcopy(model), POINTS[make])
        pipeline = ps.Pipeline(layers, schedule, 2, loss_of, transport=transport, specs=specs)
        for _ in range(2):
            for parameter in pipeline.parameters():
                parameter.grad = None
            pipeline.step(**batch, target=target)
        return {name: parameter.grad for name, parameter in pipeline.named_parameters()}

    for gradients in on_ranks(num_ranks, train):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-12)
