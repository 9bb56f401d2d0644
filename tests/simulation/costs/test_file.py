"""Costs in files: every field, lists per stage, units, and one clear message for what is wrong."""

import json
import math
import tomllib

import pytest

from penstock.errors import ConfigError, FormatError
from penstock.ir.action import Kind
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, LayerCosts, simulate
from penstock.simulation.costs.costs import Channel, Spread
from penstock.simulation.costs.file import (
    EXAMPLE,
    costs_from_json,
    costs_from_text,
    costs_from_toml,
    load_costs,
    read_costs,
)

TOML = """
forward_ms = [18.5, 24]
backward_input_ms = 18.25
backward_weight_s = 0.5
optimizer_us = 3
is_exclusive = true
bandwidth_gb_per_s = 25
message_mib = 13.5
forward_workspace_mib = 1.5
backward_workspace_kb = [2, 3]
microbatch_compute_factor = [1, 2.5]

[[channels]]
sender = 0
receiver = 1
latency_us = 12
is_exclusive = false

[[spreads]]
kind = "F"
stage = 1
median_ms = 24
quartile_range_ms = 0.25
"""
JSON = json.dumps(tomllib.loads(TOML))
COSTS = Costs(
    forward_s=(0.0185, 0.024),
    backward_input_s=(0.01825,),
    backward_weight_s=(0.5,),
    optimizer_s=(3e-6,),
    is_exclusive=True,
    bandwidth_bytes_per_s=25e9,
    message_bytes=(27 * 2**19,),
    forward_workspace_bytes=(3 * 2**19,),
    backward_workspace_bytes=(2000, 3000),
    microbatch_compute_factor=(1.0, 2.5),
    channels=(Channel(0, 1, 12e-6),),
    spreads=(Spread(Kind.FORWARD, 1, 0.024, 0.00025),),
)
READERS = {"toml": (costs_from_toml, TOML), "json": (costs_from_json, JSON)}


@pytest.mark.parametrize("kind", READERS)
def test_a_file_says_every_cost_by_its_name_and_unit(kind, tmp_path):
    read, text = READERS[kind]
    path = tmp_path / f"costs.{kind}"
    path.write_text(text)

    assert read(text) == read_costs(path) == load_costs(str(path)) == COSTS
    assert read_costs(path).source == str(path)


def test_whole_numbers_stay_whole_and_an_infinite_bandwidth_may_be_written():
    found = costs_from_toml("message_kb = 1.5\nactivation_bytes = [3.0, 4]\n[[channels]]\nsender = 0\nreceiver = 1.0")

    numbers = [*found.message_bytes, *found.activation_bytes, found.channels[0].receiver]
    assert numbers == [1500, 3, 4, 1]
    assert {type(number) for number in numbers} == {int}
    assert costs_from_toml("bandwidth_bytes_per_s = inf").bandwidth_bytes_per_s == math.inf


def test_what_a_user_gives_is_a_file_or_a_line_of_costs(tmp_path):
    assert load_costs("F=1,I=1,W=1").durations_s(2).tolist() == Costs.uniform().durations_s(2).tolist()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no.toml", r".*no\.toml': No such file .*; give a TOML or JSON file"),
        ("F", "'F': No such file .*, or such as F=1,I=1,W=1"),
        ("bytes.toml", r".*bytes\.toml': it is no text in UTF-8"),
        ("other.toml", r".*other\.toml': it is no text in UTF-8"),
    ],
)
def test_a_file_that_is_not_there_or_no_text_is_refused(name, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"forward_s = \xff")
    (tmp_path / "other.toml").write_bytes(b"\xff\xfe{}")

    with pytest.raises(ConfigError, match=f"^costs: cannot read {told}"):
        load_costs(name)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("forward_s = 1\nforward_ms = 2", "forward_ms: says the same as forward_s; keep one"),
        ("forward_ms = -1", "forward_ms: -1 is negative or not a number; costs are finite and 0 or more"),
        (f"forward_s = {'9' * 400}", r"forward_s: 9{37}\.\.\. is more than a number can hold"),
        ("message_mib = inf", "message_mib: inf is not a whole number"),
        ("message_mib = 99999999999999", "message_mib: 1048575.* bytes are more than 72057594037927936; give fewer"),
        ("forward_s = 'fast'", "forward_s: 'fast' is no number"),
        ("forward_s = [[1]]", r"forward_s: \[1\] is no number"),
        ("forward_s = []", "forward_s: is empty; give one number for each, or one for all"),
        ("message_bytes = 1.5", "message_bytes: 1.5 is not a whole number"),
        ("latency_s = [1, 2]", r"latency_s: \[1, 2\] is no number"),
        ("is_exclusive = 1", "is_exclusive: 1; expected true or false"),
        ("channels = [1]", r"channels: \[1\]; expected a list of tables"),
        ("[[channels]]\nsender = 0", r"channels\[0\]: receiver missing"),
        ("[[channels]]\nsender = 0\nreceiver = 0.5", r"channels\[0\]\.receiver: 0\.5 is not a whole number"),
        ("[[channels]]\nsender = 0\nreciever = 1", r"channels\[0\]\.reciever: is no key here\. Did you mean 'rec"),
        ("[[channels]]\nsender = 0\nreceiver = 1\nlatency_ms = -2", r"channels\[0\]\.latency_ms: -2 is negative"),
        ("[[spreads]]\nkind = 'X'", r"spreads\[0\]\.kind: 'X'; expected one of F, B, I, W"),
        ("[[spreads]]\nkind = 'F'", r"spreads\[0\]: stage and median_s and quartile_range_s missing"),
    ],
)  # fmt: skip
def test_a_wrong_cost_is_refused_with_its_key_and_file(text, told):
    with pytest.raises(ConfigError, match=rf"^{told}.* \(in costs\.toml\)$"):
        costs_from_toml(text, file="costs.toml")


@pytest.mark.parametrize(
    ("read", "text", "told"),
    [
        (costs_from_toml, "forward_s = [1,", r"costs:1:16: not TOML: "),
        (costs_from_toml, "latency_s = 1\nlatency_s = 2", r"costs:2:14: not TOML: Cannot overwrite a value"),
        (costs_from_toml, "x = " + "[" * 5000, r"costs:1:\d+: not TOML: "),
        (costs_from_json, '{"latency_s": 1,\n "forward_s" 2}', r"costs:2:14: not JSON: Expecting ':' delimiter"),
        (costs_from_json, '{"latency_s": 1, "latency_s": 2}', r"costs:1:1: not JSON: 'latency_s' is given twice; keep"),
        (costs_from_json, "[1]", r"costs:1:1: holds \[1\]; expected an object with costs by name"),
        (costs_from_json, "[" * 100_000, r"costs:1:1: not JSON: "),
    ],
    ids=range(7),
)
def test_what_is_no_toml_or_json_is_refused_with_its_place(read, text, told):
    with pytest.raises(FormatError, match=rf"^{told}"):
        read(text, file="costs")


def test_what_only_the_program_shows_names_the_file_too(tmp_path):
    path = tmp_path / "costs.toml"
    path.write_text("forward_s = [1, 2, 3]\nbackward_s = 2")

    with pytest.raises(ConfigError, match=r"^forward_s: 3 entries for 2 stages; .*costs\.toml\)$"):
        simulate(lower(build("1f1b", ranks=2, microbatches=2)), read_costs(path))
    with pytest.raises(ConfigError, match=r"^backward_input_s: is missing, but zb-h1 runs 0I0; .*costs\.toml\)$"):
        simulate(lower(build("zb-h1", ranks=3, microbatches=3)), read_costs(path))


def test_costs_per_layer_say_so():
    text = 'per = "layer"\nforward_ms = [1000, 2000]\noptimizer_s = 3\nactivation_kib = [1, 2]\nlatency_us = 1e6'

    found = costs_from_toml(text, file="layers.toml")

    expected = LayerCosts(forward=[1.0, 2.0], optimizer=3.0, activation_bytes=[1024, 2048], latency_s=1.0)
    assert found == expected
    assert found.source == "layers.toml"
    assert costs_from_json('{"per": "layer", "forward_s": [1, 2]}') == LayerCosts(forward=[1.0, 2.0])
    assert costs_from_toml('per = "stage"\nforward_s = 1') == Costs(forward_s=(1.0,))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('per = "rank"', r"^per: 'rank'; expected \"stage\" or \"layer\" \(in l\.toml\)"),
        ('per = "layer"\nforward_ms = [1, -1]', r"^forward_ms: -1 is negative"),
        ('per = "layer"\nforward = [1]', r"^forward: has no unit that is known; end it in one of s, ms, us"),
        ('per = "layer"\nspreads = []', r"^spreads: is no key here"),
        ('per = "layer"\nforward_s = [1, 2]\nsplit = [1, 2]', r"^split: \[1, 2\] adds up to 3 layers, but .* 2"),
        ('per = "layer"\nforward_s = [1, 2]\nsplit = [2, 0]', r"^split: \[2, 0\]; .* per stage, 1 or more each"),
        ("forward_s = [1, 2]\nsplit = [1, 1]", r"^split: is no key here"),
    ],
)
def test_what_is_wrong_per_layer_is_said_with_its_key(text, told):
    with pytest.raises(ConfigError, match=told):
        costs_from_toml(text, file="l.toml")


SHORT = Costs.uniform(forward=1, backward_input=2, backward_weight=3)


@pytest.mark.parametrize("text", ["F=1,I=2,W=3", " W = 3 , F=1.0,I=2e0", "F=1,I=2,W=3,B=5,transfer=0,overlap=1"])
def test_a_whole_backward_is_the_sum_of_its_parts_unless_given(text):
    assert costs_from_text(text).durations_s(2).tolist() == SHORT.durations_s(2).tolist()


def test_every_key_has_its_place():
    assert costs_from_text(EXAMPLE).latency_s == 0.1
    assert costs_from_text("F=1,I=0,W=.5,B=4,transfer=.25,overlap=0.75") == Costs.uniform(
        forward=1, backward_input=0, backward_weight=0.5, backward=4, transfer=0.25, overlap_factor=0.75
    )


def test_numbers_behind_a_cost_are_its_entries():
    costs = costs_from_text("F=1,.5, 2,I=1,W=1,1,3,transfer=0.1")

    assert (costs.forward_s, costs.backward_input_s, costs.backward_weight_s) == ((1, 0.5, 2), (1,), (1, 1, 3))
    assert costs.latency_s == 0.1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "costs: '' is not of the form key=value; expected such as F=1"),
        ("F=1,I", "costs: 'I' is not of the form key=value"),
        ("1,F=2", "costs: '1' is not of the form key=value; expected such as .*, or F=1,1,1,2 with an entry for each"),
        ("F=1,I=1,W=1,transfer=0.1,0.2", "costs: '0.2' is not of the form key=value"),
        ("F=1,-2,I=1,W=1", "costs: F is '-2'; give a finite number of 0 or more"),
        ("F=1,I=1,W=1,tranfer=1", r"no cost 'tranfer'; known: F, B, I, W, R, transfer, overlap, unshard, reduce\."),
        ("X=1", "no cost 'X'; known: F, B, I, W, R, transfer, overlap"),
        ("F=1,I=1,W=1,F=2", "costs: F is given twice; keep one"),
        ("I=1,W=1", "costs: F missing; give F, and I and W or at least B, such as F=1"),
        ("F=1", "costs: I and W missing; give F, and I and W or at least B"),
        ("F=1,I=1,W=inf", "costs: W is 'inf'; give a finite"),
    ],
)
def test_what_are_no_costs_is_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        costs_from_text(text)
