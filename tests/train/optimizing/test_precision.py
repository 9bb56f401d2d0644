"""A precision changes layers, losses and regions."""

import pytest
import torch
from torch import nn

from penstock.models import LayerSpec
from penstock.train.optimizing.precision import Precision, loss_scaler, note_on_speed
from penstock.train.settings.sections import ModelSection, PrecisionSection
from tests.train.local_ranks import small_layers

CPU = torch.device("cpu")


def precision(compute="model", **options):
    return Precision(PrecisionSection(compute=compute, **options))


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_layers_are_cast_with_the_values_of_float32_and_their_tables_stay(compute):
    for plain, cast in zip(small_layers(), precision(compute).cast(small_layers()), strict=True):
        expected, found = dict(plain().named_parameters()), cast()
        assert (cast.name, cast.weight, cast.tied) == (plain.name, plain.weight, plain.tied)
        assert expected.keys() == dict(found.named_parameters()).keys()
        for name, parameter in found.named_parameters():
            assert torch.equal(parameter, expected[name].to(getattr(torch, compute)))
        assert all(buffer.dtype is torch.float32 for buffer in found.buffers())


@pytest.mark.parametrize("model_type", [torch.float32, torch.float64])
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_computes_with_weights_and_statistics_in_float32(compute, affine, model_type):
    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=affine), nn.Linear(4, 2)).to(model_type)

    (layer,) = precision(compute).cast([LayerSpec("0", build)])
    module, dtype = layer(), getattr(torch, compute)
    norm = module[1]

    assert module(torch.randn(8, 4, dtype=dtype)).dtype is dtype
    assert {each.dtype for each in (module[0].weight, module[2].bias)} == {dtype}
    assert {each.dtype for each in (*norm.parameters(), norm.running_mean)} == {torch.float32}
    assert norm.num_batches_tracked == 1
    assert module.eval()(torch.randn(8, 4, dtype=dtype)).dtype is dtype


def test_only_a_cast_has_main_weights_and_only_float16_a_scale():
    cases = [precision(), precision("bfloat16"), precision("float16"), precision("float16", autocast=True)]

    assert [each.has_main_weights for each in cases] == [False, True, True, False]
    assert [each.scales_losses for each in cases] == [False, False, True, True]
    assert all(layer().weight.dtype is torch.float32 for layer in cases[3].cast(small_layers()[:1]))
    described = [
        "float32",
        "bfloat16 with float32 main weights",
        "float16 with float32 main weights",
        "float16 by autocast",
    ]
    assert [each.describe(ModelSection()) for each in cases] == described


@pytest.mark.parametrize(("autocast", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_region_casts_only_where_it_was_asked_for(autocast, dtype):
    ones = torch.ones(2, 2)

    with precision("bfloat16", autocast=autocast).region(CPU):
        assert (ones @ ones).dtype is dtype


def test_a_loss_is_scaled_to_its_share_and_against_underflow_only_in_float16():
    loss = torch.tensor(3.0, requires_grad=True)
    plain, scaled = (loss_scaler(precision(compute, loss_scale=8.0), CPU) for compute in ("bfloat16", "float16"))

    assert [plain.scale_mean(loss).item(), scaled.scale_mean(loss).item()] == [3.0, 24.0]
    plain.share = scaled.share = 0.25
    assert [plain.scale_mean(loss).item(), scaled.scale_mean(loss).item()] == [0.75, 6.0]
    assert (plain.is_enabled(), scaled.is_enabled()) == (False, True)


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_a_type_that_is_slower_on_this_cpu_is_noted(compute):
    """As measured on a CPU that emulates the type, and on one that has it."""
    emulated, native = ({torch.float32: 1e-4, getattr(torch, compute): other} for other in (4.3e-4, 0.6e-4))

    assert note_on_speed(precision(compute), CPU, emulated.__getitem__) == (
        f"{compute} is slower than float32 on this CPU: 4.3 times for a matrix product. "
        "Leave precision.compute out to train faster"
    )
    assert note_on_speed(precision(compute), CPU, native.__getitem__) == ""
    assert note_on_speed(precision(), CPU, emulated.__getitem__) == ""
    assert note_on_speed(precision(compute), torch.device("cuda", 0), emulated.__getitem__) == ""


def test_the_measured_seconds_are_those_of_the_type(monkeypatch):
    """Products of a type that the CPU emulates take longer; the clock counts them here."""
    now_s, seconds_of = [0.0], {torch.float32: 1.0, torch.float16: 3.0}
    product = torch.mm

    def slow(left, right):
        now_s[0] += seconds_of[left.dtype]
        return product(left, right)

    monkeypatch.setattr(torch, "mm", slow)
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])

    assert "3.0 times" in note_on_speed(precision("float16"), CPU)
