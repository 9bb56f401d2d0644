"""What a checkpoint consists of, and which rank saves which part."""

import pytest
import torch
from torch import nn

from penstock.checkpoints.content import Content, names_in_checkpoint, owned_names
from penstock.errors import CheckpointError
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import on_ranks
from tests.train.local_ranks import on_small_pipelines


def described(pipeline):
    return Content.of(pipeline, torch.optim.AdamW(pipeline.parameters())).description()


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 3), ("dualpipe", 2), ("chimera", 4)])
def test_every_tensor_is_saved_by_one_rank_that_has_it(schedule, num_ranks):
    everyone = on_small_pipelines(num_ranks, described, schedule=schedule, microbatches=8)
    owned = owned_names(everyone)

    assert sorted(name for names in owned for name in names) == sorted(
        {n for told in everyone for n in told["weights"]}
    )
    assert all(names <= told["weights"].keys() for names, told in zip(owned, everyone, strict=True))
    assert all(owned), "every rank saves something"


def test_an_owner_that_lists_its_parameter_under_another_name_is_found():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = self.first

        def forward(self, x):
            return self.second(x)

    layers = [Twice(), nn.Linear(4, 4, bias=False)]

    def case(transport):
        tied = [("0.second.weight", "1.weight")]
        pipeline = Pipeline(layers, "gpipe", 2, nn.functional.mse_loss, transport=transport, tied=tied)
        return dict(pipeline.owner_names), pipeline

    made = on_ranks(2, case)
    owner_names = [names for names, _ in made]
    found = [names_in_checkpoint(pipeline, owner_names) for _, pipeline in made]
    for _, pipeline in made:
        pipeline.close()

    assert found[0] == {"0.first.weight": "0.first.weight", "0.second.weight": "0.first.weight"}
    assert found[1] == {"1.weight": "0.first.weight"}


def test_extra_state_that_is_no_tensor_is_refused():
    class Stateful(nn.Linear):
        def get_extra_state(self):
            return {"text": "x"}

        def set_extra_state(self, state):
            pass

    pipeline = Pipeline([Stateful(2, 2)], "gpipe", 1, nn.functional.mse_loss)

    with pytest.raises(CheckpointError, match=r"'0\._extra_state' is a dict, which is no tensor"):
        Content.of(pipeline, None)
    pipeline.close()
