"""Commands with a run file have in common: flags and threads of their ranks."""

import os
import sys
from argparse import Namespace

import pytest
import torch

from penstock.cli import run_file
from penstock.errors import ConfigError
from penstock.train import devices
from tests.support.tiny_run import write_tiny_run


@pytest.mark.parametrize(("path", "flags"), [(["/elsewhere"], ["-P"]), (["", "/elsewhere"], []), ([os.getcwd()], [])])
def test_ranks_find_modules_where_this_process_does(monkeypatch, path, flags):
    monkeypatch.setattr(sys, "path", path)

    assert run_file._path_flags() == flags


def test_a_single_rank_takes_one_thread_unless_the_user_says_otherwise():
    torch.set_num_threads(2)

    run_file._use_one_thread_unless({"OMP_NUM_THREADS": "2"})
    assert torch.get_num_threads() == 2
    run_file._use_one_thread_unless({})
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("gpus", "ranks", "wanted"), [(1, 2, "auto"), (0, 1, "cuda"), (0, 2, "cuda")])
def test_too_few_gpus_are_refused_before_a_folder_is_made_or_a_rank_starts(tmp_path, monkeypatch, gpus, ranks, wanted):
    monkeypatch.setattr(devices, "look", lambda: devices.Machine("cuda", gpus, has_backend=True))
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    write_tiny_run(tmp_path)
    overrides = [f"pipeline.ranks={ranks}", f"run.device={wanted}"]

    def never(config):
        raise AssertionError("nothing may begin")

    with pytest.raises(ConfigError, match=r"Choose: .*run\.device='cpu'"):
        run_file.run_on_ranks(Namespace(run_file="run.toml", set=overrides, port=0), [], never, never)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port_is_refused(port):
    with pytest.raises(ConfigError, match=f"--port: {port} is no port; give a number from 1 to 65535"):
        run_file.run_on_ranks(Namespace(run_file="run.toml", set=[], port=port), [], None, None)
