"""All layouts that a cluster and a batch allow."""

import pytest

from penstock.errors import ConfigError
from penstock.searching.layouts.layout import Choices, Layout, layouts_of


def layouts(gpus, num_layers, global_batch, **choices):
    return list(layouts_of(gpus, num_layers, global_batch, Choices(**choices)))


def test_all_devices_are_used_and_all_sequences_are_trained():
    found = layouts(8, 34, 256)

    assert {(layout.pipeline, layout.data) for layout in found} == {(1, 8), (2, 4), (4, 2), (8, 1)}
    assert all(layout.pipeline * layout.data == 8 for layout in found)
    assert all(layout.data * layout.microbatches * layout.microbatch_size == 256 for layout in found)
    assert len(set(found)) == len(found) == 60


def test_one_replica_has_nothing_to_share_out():
    assert {layout.shard for layout in layouts(8, 34, 256) if layout.data == 1} == {"none"}
    assert {layout.shard for layout in layouts(8, 34, 256) if layout.data > 1} == {"none", "optimizer", "full"}


def test_gathering_few_stages_at_a_time_needs_layers_for_several_stages_a_rank():
    assert {layout.pipeline for layout in layouts(4, 8, 16) if layout.shard == "full"} == {1, 2}
    assert {layout.pipeline for layout in layouts(4, 7, 16) if layout.shard == "full"} == {1}


def test_replicas_that_do_not_divide_the_batch_are_left_out():
    assert {layout.data for layout in layouts(8, 34, 250)} == {1, 2}
    assert {layout.microbatch_size for layout in layouts(8, 34, 250) if layout.data == 2} == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 3, 3), "the 3 layers of the model fill at most 2 of 8 ranks, so 3 sequences are for 4 replicas or more.*"
         "use 4 sequences, or other GPUs"),
        ((64, 34, 33), "fill at most 32 of 64 ranks, so 33 sequences are for 2 replicas or more.*use 32 or 34"),
    ],
)  # fmt: skip
def test_a_batch_that_no_layout_divides_is_refused_with_the_nearest(arguments, message):
    with pytest.raises(ConfigError, match=message):
        layouts(*arguments)


def test_microbatches_that_divide_no_batch_are_refused():
    with pytest.raises(ConfigError, match="microbatches of 4 do not divide the sequences of a replica; use 4 or 8 seq"):
        layouts(2, 34, 6, microbatch_sizes=(4,))


def test_more_microbatches_than_can_be_planned_are_left_out_or_refused():
    assert {layout.data for layout in layouts(2, 34, 1 << 15, microbatch_sizes=(1,))} == {2}
    with pytest.raises(ConfigError, match=r"131072 sequences are 65,536 microbatches .*; use at most 32,768 sequences"):
        layouts(2, 34, 1 << 17, microbatch_sizes=(1,))


def test_its_text_has_what_differs():
    sizes = {"pipeline": 2, "data": 4, "microbatch_size": 1, "microbatches": 64}

    plain = Layout(shard="none", checkpointing="none", **sizes)
    other = Layout(shard="full", checkpointing="full", **sizes)

    assert str(plain) == "pipeline 2 x data 4, microbatches 1x64"
    assert str(other) == "pipeline 2 x data 4, shard full, microbatches 1x64, full checkpointing"
