"""Each unit is of the rank that owns its first name, on all ranks alike; what no rank could make alone is refused."""

from torch import nn

from penstock.checkpoints.content import gather_content, owned_names
from penstock.checkpoints.weight_files import save_weights
from penstock.checkpoints.weight_format import PLAIN, ConversionUnit, WeightFormat
from penstock.checkpoints.weight_units import units_by_rank
from penstock.errors import NotSaved
from tests.checkpoints.written_files import names
from tests.support.local_pipelines import error_of, on_ranks
from tests.train.local_ranks import small_pipeline


def layers():
    return [nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False)]


def test_every_rank_learns_the_units_of_all_ranks():
    def case(transport):
        with small_pipeline(transport, layers()) as pipeline:
            _, descriptions, _ = gather_content(pipeline, None)
            mine = units_by_rank(pipeline, PLAIN, descriptions, owned_names(descriptions))
            return mine, units_by_rank(pipeline, PLAIN, descriptions, [frozenset(), frozenset()])

    (first, nothing), (second, _) = on_ranks(2, case)

    assert first == second
    assert [[unit["names"] for unit in units] for units in first] == [[["0.weight"]], [["1.weight"]]]
    assert first[1][0]["file_types"] == {"1.weight": ["F32", [3, 2]]}
    assert nothing == [[], []]


class Merging(WeightFormat):
    """Saves all under one name, which no two ranks can."""

    def units(self, tensors):
        return [ConversionUnit(names=[name], file_types={"all": entry}) for name, entry in tensors.items()]


def test_two_ranks_that_would_save_one_tensor_are_refused(tmp_path):
    def case(transport):
        with small_pipeline(transport, layers()) as pipeline:
            return error_of(save_weights, tmp_path, pipeline, Merging())

    for error in on_ranks(2, case):
        assert type(error) is NotSaved
        assert "'1.weight' and '0.weight' are saved as one tensor, 'all', but no rank has both" in str(error)
    assert names(tmp_path) == []
