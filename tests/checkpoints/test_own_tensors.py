"""Which rows of which tensors a rank reads, and how they come into its model."""

import pytest
import torch

from penstock.checkpoints.own_tensors import own_tensors
from penstock.errors import CheckpointError
from tests.checkpoints.layouts import Layout, known, run, wrong
from tests.train.local_ranks import error_of


def rows_of_tensors(pipeline):
    own = own_tensors(pipeline)
    return own.rows(), sorted(own.names.values())


def test_a_rank_with_shards_reads_its_rows_and_whole_buffers():
    first, second = run(Layout(1, 2, is_sharded=True), rows_of_tensors)

    of_first_layer = {name: rows for name, rows in first[0].items() if name.startswith("0.")}
    assert of_first_layer == {
        "0.matrix": range(3),
        "0.row": range(1),
        "0.none": range(0),
        "0.frozen": range(4),
    }
    assert {name: second[0][name] for name in of_first_layer} == {
        "0.matrix": range(3, 5),
        "0.row": range(1, 1),
        "0.none": range(0),
        "0.frozen": range(4, 7),
    }
    assert first[1] == second[1]
    assert {"0.scale", "0.running", "0.count"} <= set(first[1])


def test_replicas_read_all_of_what_they_hold():
    assert [rows for rows, _ in run(Layout(2, 2), rows_of_tensors)] == [{}] * 4


def fill_from_files(pipeline):
    own = own_tensors(pipeline)
    rows, read = own.rows(), {}
    for name, held in own.held.items():
        whole = known(f"{name}:", held.shape, held.local.dtype)
        read[own.names[name]] = whole if name not in rows else whole[rows[name].start : rows[name].stop]
    before = {id(parameter) for parameter in pipeline.parameters()}
    own.load(pipeline, read)
    return wrong(pipeline), {id(parameter) for parameter in pipeline.parameters()} == before


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(2, 2), Layout(1, 3, is_sharded=True)], ids=str)
def test_what_was_read_is_copied_into_the_parameters_that_are_there(layout):
    for found, are_the_same in run(layout, fill_from_files):
        assert found == []
        assert are_the_same


class Other(torch.nn.Linear):
    def get_extra_state(self):
        return 3

    def set_extra_state(self, state): ...


def test_what_is_no_tensor_on_one_rank_is_one_error_on_all():
    def case(pipeline):
        return str(error_of(own_tensors, pipeline)), type(error_of(own_tensors, pipeline))

    found = run(Layout(2, 1), case, make_layers=lambda: [torch.nn.Linear(2, 2), Other(2, 2)])

    words = "'1._extra_state' is a int, which is no tensor; save it in `extra`"
    assert found == [(f"rank 1: {words}", CheckpointError), (words, CheckpointError)]
