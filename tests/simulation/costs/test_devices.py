"""The descriptions that ship with the package: every figure has a source, and they agree with each other."""

from dataclasses import replace

import pytest

from penstock.errors import ConfigError
from penstock.simulation.costs.devices import device, device_of_torch, link, tables

DEVICES = [device(name) for name in tables()["device"]]
LINKS = [link(name) for name in tables()["link"]]


def test_the_known_devices_and_links_are_there():
    assert list(tables()["device"]) == [
        "a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200-sxm", "l40s", "rtx-4090", "mi300x",
    ]  # fmt: skip
    assert {"nvlink-3", "nvlink-4", "nvlink-5", "pcie-4-x16", "pcie-5-x16", "infiniband-ndr", "roce-400g"} <= set(
        tables()["link"]
    )


@pytest.mark.parametrize("each", DEVICES + LINKS, ids=lambda each: each.name)
def test_every_description_names_the_document_that_it_is_from(each):
    assert each.source.startswith(("NVIDIA ", "AMD "))
    assert "data sheet" in each.source or "white paper" in each.source or "user manual" in each.source


@pytest.mark.parametrize("each", DEVICES, ids=lambda each: each.name)
def test_figures_of_a_device_are_of_their_order(each):
    assert each.flops_per_s("bf16") == each.flops_per_s("fp16")
    assert each.flops_per_s("bf16") == pytest.approx(2 * each.flops_per_s("tf32"), rel=0.02)
    assert 1e13 < each.flops_per_s("fp32") <= each.flops_per_s("tf32") < 1.2e15
    assert 24e9 <= each.memory_bytes <= 192e9
    assert 8e11 < each.memory_bytes_per_s < 1e13


@pytest.mark.parametrize("each", DEVICES, ids=lambda each: each.name)
def test_what_kernels_reach_is_of_its_order_and_less_backward(each):
    kernels = each.kernels

    assert 100 <= kernels.multiprocessors <= 304
    assert 0.5 < kernels.matmul_share < 0.9
    assert kernels.attention_backward_share == pytest.approx(kernels.attention_share * 0.63 / 0.73, abs=0.01)
    assert 0 < kernels.launch_s < 1e-5


@pytest.mark.parametrize("kind", ["device", "link"])
def test_every_figure_has_a_source_or_says_that_it_is_assumed(kind):
    for name, fields in tables()[kind].items():
        for key, figure in {**fields, **fields.get("kernels", {})}.items():
            if isinstance(figure, dict) and key != "kernels":
                assert ("source" in figure) != figure.get("assumed", False), (name, key)
                assert len(figure) == 2, (name, key)


def test_a_description_names_the_fields_that_are_assumed():
    assert device("l40s").kernels.assumed == (
        "matmul_share", "attention_share", "attention_backward_share", "memory_share", "launch_s",
    )  # fmt: skip
    assert "matmul_share" not in device("h100-sxm").kernels.assumed
    assert device("rtx-4090").assumed == ("link_between_nodes",)
    assert link("nvlink-4").assumed == ("latency_s",)


@pytest.mark.parametrize("each", DEVICES, ids=lambda each: each.name)
def test_every_device_has_links_within_and_between_nodes(each):
    assert link(each.link_within_node).reached_bytes_per_s > link(each.link_between_nodes).reached_bytes_per_s > 0


def test_a_link_reaches_a_share_of_its_bandwidth():
    assert link("nvlink-4").reached_bytes_per_s == pytest.approx(0.82 * 450e9)
    assert link("infiniband-ndr").latency_s == 20e-6


@pytest.mark.parametrize(
    ("name", "value"), [("matmul_share", 0), ("attention_share", 1.2), ("multiprocessors", 0), ("launch_s", -1)]
)
def test_kernels_that_cannot_be_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name}: {value}; expected"):
        replace(device("h100-sxm").kernels, **{name: value})


def test_a_peak_is_found_by_the_word_of_torch():
    h100 = device("h100-sxm")

    assert h100.peak_of("bfloat16") == h100.peak_of("float16") == 989.4e12
    assert h100.peak_of("float32") == 66.9e12
    assert h100.peak_of("tf32") == 494.7e12


def test_a_type_without_a_peak_is_refused_with_those_that_have_one():
    expected = r"data_type: h100-sxm has no peak for products of 'float64'; known: bfloat16, float16, tf32, float32"
    with pytest.raises(ConfigError, match=expected):
        device("h100-sxm").peak_of("float64")


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


@pytest.mark.parametrize(
    ("find", "name", "near"),
    [
        (device, "h100", "h100-sxm"),
        (device, "A100", "a100-sxm-40gb' or 'a100-sxm-80gb"),
        (device, "NVIDIA GeForce RTX 4090", "rtx-4090"),
        (device, "h1o0-sxm", "h100-sxm"),
        (link, "infiniband", "infiniband-hdr' or 'infiniband-ndr"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(find, name, near):
    word = find.__name__

    expected = rf"^{word}: there is no {word} '{name}'; known: .*Did you mean '{near}'.* with {word.capitalize()}\("
    with pytest.raises(ConfigError, match=expected):
        find(name)


def test_descriptions_cannot_be_changed():
    tables()["device"]["h100-sxm"]["memory_bytes"] = 1

    assert device("h100-sxm").memory_bytes == 80 * 10**9
