"""Why nothing fits, and what would do."""

from dataclasses import replace

from penstock.searching.layouts.refusing import nothing_fits
from tests.searching.layouts.cases import MIB, costs_of, question
from tests.searching.layouts.test_problem import ONE_SIZE


def text_of(asked):
    return str(nothing_fits(asked, asked.problems()))


def test_it_says_what_the_fullest_rank_holds_and_how_many_devices_would_do():
    text = text_of(question(gpus=2, memory_bytes=230 * MIB, global_batch=64, **ONE_SIZE))

    assert text.startswith("gpus: no layout was found that fits 2 devices of 230 MiB for tensors; pipeline ")
    assert "optimizer state" in text
    assert "devices would do" in text


def test_a_layer_that_no_device_holds_is_named():
    text = text_of(question(memory_bytes=50 * MIB, **ONE_SIZE))

    assert text.startswith("device: layer 1 of 8 takes 60.0 MiB by itself, of them 60.0 MiB of weights and gradients")


def test_a_layer_that_fits_with_checkpointing_is_not_named():
    """Blocks keep 400 MiB, or with checkpointing their input; all weights and states are too large in either case."""
    plain = costs_of()

    def costs(size, kind):
        kept = plain(size, kind).activation_bytes
        return replace(
            plain(size, kind), activation_bytes=[20 * number if kind == "none" else number for number in kept]
        )

    text = text_of(question(gpus=1, memory_bytes=300 * MIB, costs=costs, microbatch_sizes=(1,)))

    assert text.startswith("gpus: no layout was found that fits 1 device ")


def test_where_no_number_of_devices_helps_it_says_what_else():
    text = text_of(question(gpus=4, memory_bytes=70 * MIB, global_batch=4, **ONE_SIZE))

    assert text.endswith("Take devices with more memory, shorter sequences, or a smaller model")
