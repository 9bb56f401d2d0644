"""The descriptions that ship with the package: every figure has a source, and they agree with each other."""

import pytest

from penstock.errors import ConfigError
from penstock.simulation.costs.devices import device, device_of_torch, link, tables

DEVICES = [device(name) for name in tables()["device"]]
LINKS = [link(name) for name in tables()["link"]]


def test_the_known_devices_and_links_are_there():
    assert list(tables()["device"]) == ["a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm", "h200-sxm", "mi300x"]
    assert {"nvlink-3", "nvlink-4", "pcie-4-x16", "pcie-5-x16", "infiniband-ndr", "roce-400g"} <= set(tables()["link"])


@pytest.mark.parametrize("each", DEVICES + LINKS, ids=lambda each: each.name)
def test_every_description_names_the_document_that_it_is_from(each):
    assert each.source.startswith(("NVIDIA ", "AMD "))
    assert "data sheet" in each.source or "white paper" in each.source or "user manual" in each.source


@pytest.mark.parametrize("each", DEVICES, ids=lambda each: each.name)
def test_figures_of_a_device_are_of_their_order(each):
    assert each.flops_per_s("bf16") == each.flops_per_s("fp16")
    assert each.flops_per_s("bf16") == pytest.approx(2 * each.flops_per_s("tf32"), rel=1e-3)
    assert 1e13 < each.flops_per_s("fp32") < each.flops_per_s("tf32") < 1e15
    assert 40e9 <= each.memory_bytes <= 192e9
    assert 1e12 < each.memory_bytes_per_s < 1e13


def test_a_device_is_found_by_the_name_that_torch_has_for_it():
    assert device_of_torch("NVIDIA H200") == device("h200-sxm")
    assert device_of_torch("NVIDIA A100-SXM4-40GB") == device("a100-sxm-40gb")
    assert device_of_torch("NVIDIA H200 NVL") is None
    assert all(each.names_in_torch for each in DEVICES)


def test_published_figures():
    assert device("a100-sxm-80gb").flops_per_s("bf16") == 312e12
    assert device("h100-sxm").flops_per_s("fp16") == device("h200-sxm").flops_per_s("fp16") == 989.4e12
    assert device("h200-sxm").memory_bytes_per_s == 4.8e12
    assert device("mi300x").memory_bytes == 192 * 10**9
    assert link("nvlink-4").bandwidth_bytes_per_s == 900e9 / 2  # printed for both directions together
    assert link("infiniband-ndr").bandwidth_bytes_per_s == 400e9 / 8


@pytest.mark.parametrize(("find", "name", "near"), [(device, "h100", "h100-sxm"), (link, "nvlink4", "nvlink-4")])
def test_an_unknown_name_is_refused_with_the_nearest(find, name, near):
    word = find.__name__

    expected = rf"^{word}: there is no {word} '{name}'; known: .*Did you mean '{near}'.* with {word.capitalize()}\("
    with pytest.raises(ConfigError, match=expected):
        find(name)


def test_descriptions_cannot_be_changed():
    tables()["device"]["h100-sxm"]["memory_bytes"] = 1

    assert device("h100-sxm").memory_bytes == 80 * 10**9
