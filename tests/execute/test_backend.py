"""The backends that `compile` names: found by torch, chosen by what is installed, and refused where unknown."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from penstock.errors import ConfigError
from penstock.execute import backend
from tests.support.local_pipelines import block, error_of, values

pytestmark = pytest.mark.usefixtures("nothing_stays_compiled")

ROOT = Path(__file__).parents[2]
COMPILED_BY_NAME = """
import torch
from tests.support.local_pipelines import WIDTH, block, values
layer = torch.compile(block(0), backend="penstock")
layer(values(1, 3, WIDTH)).sum().backward()
print(type(layer(values(1, 3, WIDTH)).grad_fn).__name__)
"""


def test_true_and_the_names_of_inductor_are_the_backend_penstock():
    assert {backend.find_backend(name) for name in (True, "penstock", "inductor")} == {backend.penstock}
    assert backend.find_backend("aot_eager") is backend.aot_eager
    assert backend.find_backend("eager") == "eager"


def test_an_unknown_backend_is_refused_with_the_known_ones():
    error = error_of(backend.find_backend, "inducter")

    assert isinstance(error, ConfigError)
    assert "no backend 'inducter'. Did you mean 'inductor'" in str(error)
    assert all(name in str(error) for name in ("aot_eager", "inductor", "penstock", "cudagraphs"))


def test_without_a_compiler_layers_run_as_aot_eager_and_that_is_said_once(monkeypatch, told_warnings):
    monkeypatch.setattr(backend, "obstacle_to_inductor", lambda device: f"no compiler for {device}; install one")
    monkeypatch.setattr(backend, "compile_inductor", None)
    backend._has_inductor.cache_clear()
    layers = [block(0), block(1)]
    inputs = values(1, 3, 6)

    found = [torch.compile(layer, backend=backend.penstock)(inputs) for layer in layers]
    backend._has_inductor.cache_clear()

    assert all(torch.equal(each, layer(inputs)) for each, layer in zip(found, layers, strict=True))
    (told,) = told_warnings()
    assert told == "compiled layers run as aot_eager, one operation after another: no compiler for cpu; install one"


@pytest.mark.slow
def test_torch_finds_the_backend_of_an_installed_penstock_by_its_name(tmp_path):
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    folder = tmp_path / "installed-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    lines = [line for group, own in entries.items() for line in (f"[{group}]", *map(" = ".join, own.items()))]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    places = ":".join([str(tmp_path), str(ROOT / "src"), str(ROOT)])

    done = subprocess.run(
        [sys.executable, "-c", COMPILED_BY_NAME],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.stdout.split() == ["CompiledFunctionBackward"], done.stderr
