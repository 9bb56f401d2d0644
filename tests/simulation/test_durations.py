"""How long instructions keep their rank busy; their places in time are the engine's."""

import pytest

from penstock.errors import ConfigError
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs
from penstock.simulation.durations import durations_s
from tests.simulation.drawing import drawn, sharded


def lasts(program, costs):
    """Seconds of every instruction by its text."""
    return {str(program.instruction(row)): seconds for row, seconds in enumerate(durations_s(program, costs).tolist())}


@pytest.mark.parametrize(("key", "text"), [("backward_input_s", "0I0"), ("backward_weight_s", "0W0")])
def test_a_kind_that_runs_and_is_unknown_is_refused_with_its_key_and_file(key, text):
    program = lower(build("zb-h1", ranks=1, microbatches=1))
    costs = Costs(**{"forward_s": (1.0,), "backward_input_s": (1.0,), "backward_weight_s": (1.0,), key: ()},
                  source="costs.toml")  # fmt: skip

    with pytest.raises(ConfigError, match=rf"^{key}: is missing, but zb-h1 runs {text}; give .* \(in costs.toml\)$"):
        durations_s(program, costs)


def test_a_whole_backward_is_known_by_its_parts_and_a_kind_that_does_not_run_need_not_be_known():
    parts = Costs(forward_s=(1.0,), backward_input_s=(2.0, 3.0), backward_weight_s=(4.0,))

    found = lasts(drawn("0F0 0B0", "1F0 1B0"), parts)

    assert (found["0B0"], found["1B0"]) == (6, 7)
    assert lasts(sharded("0F0 0B0"), Costs(forward_s=(1.0,), backward_s=(2.0,))) == {"0F0": 1, "0B0": 2}


def test_forwards_that_prepare_a_split_backward_have_seconds_of_their_own():
    costs = Costs.uniform(forward=1.0, split_forward_s=(1.5, 1.25))
    mixed = drawn("0F0 0B0", "1F0 1I0 1W0")

    assert (lasts(mixed, costs)["0F0"], lasts(mixed, costs)["1F0"]) == (1.0, 1.25)
    assert lasts(lower(build("zb-h1", ranks=2, microbatches=1)), costs)["0F0"] == 1.5
    assert lasts(lower(build("zb-h1", ranks=2, microbatches=1)), Costs.uniform(forward=1.0))["0F0"] == 1.0
