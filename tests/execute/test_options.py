"""Options of a pipeline and options of its schedule."""

import math
from types import SimpleNamespace

import pytest

from penstock.errors import ConfigError
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.microbatch import BatchSpec, Concat, Replicate, Split, Sum
from penstock.execute.batch.reader import StreamRules
from penstock.execute.options import PipelineOptions, refuse_unknown, split_options
from penstock.schedules import build


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("deadlin_s", "the option 'deadlin_s'. Did you mean 'deadline_s'"),
        ("warmupp", "the option 'warmupp'. Did you mean 'warmup'"),
        ("group", "the option 'group'. It is process_group where .*, group_size where"),
    ],
)
def test_a_misspelt_option_names_the_nearest_of_either_and_an_old_one_those_that_have_its_name(given, told):
    refuse_unknown({"warmup": "eager"}, "1f1b", ["warmup"])

    with pytest.raises(ConfigError, match=told):
        refuse_unknown({given: 1}, "1f1b", ["warmup"])


WRONG = {
    "deadline_s": [0, "60", 1e9, math.inf, math.nan],
    "transport": ["gloo", 3, SimpleNamespace(rank=0, num_ranks=1)],
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
    "one_stream": ["x", None],
    "offload": [0, "0", [-1], [0.5], [True]],
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


RIGHT = {
    "seed": [0, 2**63 - 1],
    "device": ["cpu"],
    "run_ahead": [1],
    "deadline_s": [1e6],
    "merge": [Concat(1)],
    "merge_slices": [[list, None, {"logits": Sum()}]],
    "tied": [[("0.weight", "5.weight"), ["0.bias", "5.bias"]], {("0.weight", "5.weight")}],
}


@pytest.mark.parametrize("key", WRONG)
def test_an_option_of_another_kind_is_refused_by_its_name(key):
    for value in RIGHT.get(key, []):
        PipelineOptions(**{key: value})
    for value in WRONG[key]:
        with pytest.raises(ConfigError) as caught:
            PipelineOptions(**{key: value})
        assert caught.value.key == key


def test_the_batch_is_cut_as_the_schedule_and_the_options_say():
    specs, slice_specs = BatchSpec(args=Replicate()), BatchSpec(args=Split(2))
    cutting = {"allow_ragged": True, "specs": specs, "slice_dim": 2, "slice_specs": slice_specs}
    own, rest = split_options(cutting | {"warmup": "eager"})

    assert (own.reduction, rest) == ("mean", {"warmup": "eager"})
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


@pytest.mark.feature("H1")
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"overlap": print}, "its pairs run on streams of their own; leave out one of the two"),
        ({"messages": "rendezvous"}, "beside messages='rendezvous': each send waits for its receive by the hosts"),
        ({"debug": "values"}, "beside debug='values': a header goes with each message"),
    ],
)
def test_one_stream_is_refused_beside_what_needs_more_or_other_messages(other, told):
    with pytest.raises(ConfigError, match=told) as error:
        PipelineOptions(one_stream=True, **other)

    assert error.value.key == "one_stream"
    assert PipelineOptions(one_stream=True).transport_model.name == "coalesced"
    assert PipelineOptions(one_stream=True).coalesces
