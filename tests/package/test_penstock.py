import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import penstock as ps


def modules_loaded_by(code):
    """Return the modules that a fresh process has loaded when it has run some code."""
    code = f"import json, sys; {code}; print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", code]
    return set(json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout))


def test_freeing_the_layers_of_other_ranks_does_not_load_sympy():
    """torch imports it (0.4 s) for the memory format of a tensor made like one on the meta device."""
    free = "from penstock.execute.stages.other_layers import free_other_layers as free"

    assert "sympy" not in modules_loaded_by(f"{free}; from torch import nn; free([nn.Linear(8, 8)], {{}})")


def test_importing_loads_nothing_heavy_and_planning_neither_torch_nor_numba_nor_masked_arrays():
    """numpy loads numpy.ma for np.unique, which takes half as long as planning for 8 ranks."""
    planning = "import penstock as ps; ps.plan(ps.build('1f1b', ranks=8, microbatches=32), ps.Costs.uniform())"
    loaded = modules_loaded_by(f"import numpy; {planning}") - modules_loaded_by("import numpy")

    assert not loaded & {"torch", "numba", "numpy.ma"}
    assert not modules_loaded_by("import penstock") & {"torch", "numpy", "numba", "matplotlib", "pydantic", "rich"}


def test_every_public_name_is_there():
    assert [name for name in ps.__all__ if not hasattr(ps, name)] == []
    assert len(ps.__all__) <= 62  # also what options and errors tell users to pass, such as merge rules
    assert dir(ps) == sorted(ps.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Pipelines'"):
        _ = ps.Pipelines


def test_type_checkers_read_the_same_names_from_the_same_modules():
    stub = ast.parse(Path(ps.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    lines = [node for node in stub.body if isinstance(node, ast.ImportFrom)]

    names = {node.names[0].asname: node.module for node in lines}
    assert names == ps._HOMES | dict.fromkeys(ps._MODULES, "penstock")
    assert [node.names[0].name for node in lines] == [node.names[0].asname for node in lines]


def test_texts_name_what_is_public_by_its_short_name():
    classes = "|".join(name for name in ps._HOMES if name[0].isupper())
    long = re.compile(rf"penstock(?:\.[a-z_]+)+\.({classes})\b")
    root = Path(__file__).parents[2]
    for path in [*root.glob("src/**/*.py"), *root.glob("docs/**/*.md"), root / "README.md"]:
        text = path.read_text(encoding="utf-8")

        assert not long.findall(text), path
        if path.suffix == ".py":
            assert set(re.findall(r"\bps\.([A-Za-z_]+)", text)) <= set(ps.__all__), path


def test_the_five_lines_of_the_face_plan_and_predict():
    schedule = ps.build("1f1b", ranks=4, microbatches=8)
    ps.check(schedule)
    program = ps.lower(schedule)

    timeline = ps.simulate(program, ps.Costs.uniform(forward=1, backward_input=1, backward_weight=1))

    assert timeline.makespan_s == (8 + 3) * 3
    assert timeline.bubble_fraction == pytest.approx(3 / 11)
    assert timeline.peak_activations == [4, 3, 2, 1]


SCHEDULE = ps.build("1f1b", ranks=2, microbatches=2)


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda: ps.check(None), "table: None; expected a Schedule or a Program"),
        (lambda: ps.plan(None, ps.Costs.uniform()), "table: None; expected a Schedule or a Program"),
        (lambda: ps.check(SCHEDULE, memory_limit="3"), "memory_limit: 3 is a number of bytes, but there are no costs"),
        (lambda: ps.lower(ps.lower(SCHEDULE)), "of type Program; expected a Schedule that is not lowered yet"),
        (lambda: ps.lower("1f1b"), "schedule: '1f1b' of type str; expected a Schedule"),
        (lambda: ps.simulate("1f1b", ps.Costs.uniform()), "of type str; expected a Schedule or a Program"),
        (lambda: ps.simulate(ps.lower(SCHEDULE), None), "costs: None; expected Costs"),
        (lambda: ps.Schedule.from_csv(None), "text: None; expected a text"),
        (lambda: ps.Schedule.from_json(b"{}"), "text: b'{}' of type bytes; expected a text"),
        (lambda: ps.Program.from_csv(3), "text: 3 of type int; expected a text"),
        (lambda: ps.Program.from_json(None), "text: None; expected a text"),
    ],
)
def test_what_is_of_another_type_is_refused_with_what_was_expected(act, told):
    with pytest.raises(ps.ConfigError) as caught:
        act()

    assert told in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    schedule = ps.build("1f1b", ranks=np.int64(2), microbatches=np.int32(2))

    assert schedule == SCHEDULE
    costs = ps.Costs.uniform(activation_bytes=1)
    limits = (np.int64(2), [2, 2], "2 bytes")
    assert len({str(ps.check(schedule, costs=costs, memory_limit=limit)) for limit in limits}) == 1
