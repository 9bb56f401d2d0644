"""Options of a pipeline and options of its schedule."""

import math

import pytest

from penstock.errors import ConfigError
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.microbatch import BatchSpec, Concat, Replicate, Split, Sum
from penstock.execute.batch.stream import StreamRules
from penstock.execute.options import PipelineOptions, refuse_unknown, split_options
from penstock.schedules import build


def test_options_are_told_apart_by_name():
    own, rest = split_options({"deadline_s": 2.0, "warmup": "eager"})

    assert own.deadline_s == 2.0
    assert own.reduction == "mean"
    assert rest == {"warmup": "eager"}


@pytest.mark.parametrize(("given", "meant"), [("deadlin_s", "deadline_s"), ("warmupp", "warmup")])
def test_a_misspelt_option_names_the_nearest_of_either(given, meant):
    with pytest.raises(ConfigError, match=f"has the option '{given}'. Did you mean '{meant}'"):
        refuse_unknown({given: 1}, "1f1b", ["warmup"])


def test_the_name_that_two_options_had_is_refused_with_the_names_that_they_have():
    with pytest.raises(ConfigError, match=r"the option 'group'. It is process_group where .*, group_size where"):
        refuse_unknown({"group": 2}, "interleaved-1f1b", ["group_size"])


WRONG = {
    "deadline_s": [0, "60", 1e9, math.inf, math.nan],
    "transport": ["gloo", 3],
    "device": ["gpu", object()],
    "count": [3],
    "reduce_stage": ["stage"],
    "optimizer_step": [1],
    "overlap": [True],
    "allow_ragged": ["x", 1, None],
    "check_batches": ["x", 0],
    "variable_shapes": ["x", None],
    "main_gradients": ["x", 1],
    "ranges": ["x", 3],
    "merge": [3, "cat", [print, 3], {"logits": "cat"}],
    "merge_slices": [3, "cat"],
    "tied": [3, "0.weight", ["0.weight", "5.weight"], [("0.weight",)], [("0.weight", 5)]],
    "specs": [Replicate()],
    "slice_specs": [{}],
    "slice_dim": ["sequence"],
    "seed": [-1, 2**63, 1.0, "1", True],
    "run_ahead": [0, -1, 1.5, True],
    "data_warn_s": [0, "1", 1e9],
    "clock": [print],
    "debug": ["value", 2],
}


@pytest.mark.parametrize("key", WRONG)
def test_an_option_of_another_kind_is_refused_by_its_name(key):
    for value in WRONG[key]:
        with pytest.raises(ConfigError) as caught:
            PipelineOptions(**{key: value})
        assert caught.value.key == key


MAY_BE_GIVEN = [
    {"seed": 0},
    {"seed": 2**63 - 1},
    {"device": "cpu"},
    {"run_ahead": 1},
    {"deadline_s": 1e6},
    {"merge": Concat(1), "merge_slices": [list, None, {"logits": Sum()}]},
    {"tied": [("0.weight", "5.weight"), ["0.bias", "5.bias"]]},
    {"tied": {("0.weight", "5.weight")}},
]


@pytest.mark.parametrize("given", MAY_BE_GIVEN)
def test_what_may_be_given_passes(given):
    PipelineOptions(**given)


def test_known_options_pass():
    refuse_unknown({"warmup": "eager"}, "1f1b", ["warmup"])


def test_the_batch_is_cut_as_the_schedule_and_the_options_say():
    specs, slice_specs = BatchSpec(args=Replicate()), BatchSpec(args=Split(2))
    own, _ = split_options({"allow_ragged": True, "specs": specs, "slice_dim": 2, "slice_specs": slice_specs})

    rule = own.batch_rule(build("seq1f1b", ranks=2, microbatches=3, slices=4))

    assert rule == BatchRule(3, 4, True, specs, 2, slice_specs)


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        ({}, StreamRules(warn_s=1.0)),
        ({"data_warn_s": None, "count": len}, StreamRules(has_count=True)),
        ({"variable_shapes": True, "reduction": "sum"}, StreamRules(has_variable_shapes=True, is_sum=True, warn_s=1.0)),
    ],
)
def test_what_microbatches_of_a_stream_must_be_like_follows_from_the_options(given, rules):
    assert split_options(given)[0].stream_rules() == rules
