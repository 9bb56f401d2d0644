"""A result says which losses there are."""

import pickle
from itertools import product

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.losses.results import MicrobatchLosses, NamedLosses, reported_by_microbatch
from penstock.execute.losses.step_losses import StepLosses


@pytest.mark.feature("0.13")
def test_a_result_says_which_losses_there_are():
    losses, named = MicrobatchLosses([torch.tensor(1.0), torch.tensor(2.0)]), NamedLosses(balance=torch.tensor(3.0))

    assert (float(losses[-1]), float(named["balance"])) == (2.0, 3.0)
    assert [float(loss) for loss in losses[1:]] == [2.0]
    for index in (2, -3):
        with pytest.raises(PipelineError, match=f"of microbatch {index}: there are those of microbatches 0 to 1"):
            _ = losses[index]
    with pytest.raises(PipelineError, match=r"no loss 'balanse': there are 'balance'. Did you mean"):
        _ = named["balanse"]
    with pytest.raises(PipelineError, match="no loss 'a': there are none with a name"):
        _ = NamedLosses()["a"]
    assert named.get("a") is None


@pytest.mark.feature("0.13")
def test_losses_travel_between_processes():
    losses, named = pickle.loads(pickle.dumps((MicrobatchLosses([1.0]), NamedLosses(a=2.0))))

    assert (type(losses), losses) == (MicrobatchLosses, [1.0])
    assert (type(named), named) == (NamedLosses, {"a": 2.0})


def test_reports_are_listed_per_microbatch_whose_loss_this_rank_has():
    losses = StepLosses(3, 1)
    assert reported_by_microbatch(losses) == []

    losses.computed.update({(b, 0): torch.tensor(1.0) for b in (2, 0)})
    losses.reported[2, 0] = "last"

    assert reported_by_microbatch(losses) == [None, "last"]
    places = list(product(range(2), repeat=2))
    sliced = StepLosses(2, 2, computed=dict.fromkeys(places), reported={place: place for place in places})
    assert reported_by_microbatch(sliced) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
