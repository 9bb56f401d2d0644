import json
import subprocess
import sys

import pytest

import penstock as ps


def fresh_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_importing_it_loads_neither_torch_nor_numba_nor_plotting():
    code = "import json, sys, penstock; print(json.dumps(sorted(sys.modules)))"

    loaded = set(json.loads(fresh_process(code)))

    assert not loaded & {"torch", "numba", "matplotlib", "plotly", "pydantic", "rich"}


def test_planning_a_small_schedule_loads_neither_torch_nor_numba():
    code = (
        "import json, sys, penstock as ps; "
        "ps.plan(ps.build('1f1b', ranks=8, microbatches=32), ps.Costs.uniform()); "
        "print(json.dumps(sorted(sys.modules)))"
    )

    loaded = set(json.loads(fresh_process(code)))

    assert not loaded & {"torch", "numba"}


def test_every_public_name_is_there():
    assert [name for name in ps.__all__ if not hasattr(ps, name)] == []
    assert len(ps.__all__) <= 20


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Pipelines'"):
        _ = ps.Pipelines


def test_the_five_lines_of_the_face_plan_and_predict():
    schedule = ps.build("1f1b", ranks=4, microbatches=8)
    ps.check(schedule)
    program = ps.lower(schedule)

    timeline = ps.simulate(program, ps.Costs.uniform(forward=1, backward_input=1, backward_weight=1))

    assert timeline.makespan_s == (8 + 3) * 3
    assert timeline.bubble_fraction == pytest.approx(3 / 11)
    assert timeline.peak_activations == [4, 3, 2, 1]


def test_the_same_lines_train_on_one_process():
    import torch

    layers = [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)]
    batch, labels = torch.randn(8, 4), torch.randn(8, 2)
    pipeline = ps.Pipeline(layers, schedule="1f1b", microbatches=4, loss=torch.nn.functional.mse_loss)

    result = pipeline.step(batch, target=labels)

    expected = torch.nn.functional.mse_loss(torch.nn.Sequential(*layers)(batch), labels)
    torch.testing.assert_close(result.loss, expected)
    assert all(parameter.grad is not None for _, parameter in pipeline.named_parameters())
    pipeline.close()
