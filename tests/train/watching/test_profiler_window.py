"""Steps under torch's profiler: which, and what is left of them."""

import gzip
import json
import logging
from itertools import pairwise

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from penstock.train.settings.sections import ProfileSection
from penstock.train.watching.profiler_window import ProfilerWindow, memory_counters

CPU = torch.device("cpu")


def window_of(folder, rank=0, device=CPU, **options):
    return ProfilerWindow(ProfileSection(**options), folder, rank, device)


def run(window, steps):
    for step in steps:
        with window.around(step):
            torch.ones(100, 100) @ torch.ones(100, 100)


def events_of(path):
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def steps_of(path):
    return sorted({event["name"] for event in events_of(path) if event.get("name", "").startswith("step ")})


def test_the_steps_of_the_window_are_in_the_trace_which_is_there_after_the_last(tmp_path):
    window = window_of(tmp_path, rank=1, steps=[2, 3])

    run(window, [1, 2])
    assert list(tmp_path.iterdir()) == []
    run(window, [3])

    assert [path.name for path in tmp_path.iterdir()] == ["profile-rank1.json.gz"]
    assert steps_of(tmp_path / "profile-rank1.json.gz") == ["step 2", "step 3"]
    run(window, [4, 5])
    window.close()
    assert steps_of(tmp_path / "profile-rank1.json.gz") == ["step 2", "step 3"]


@pytest.mark.parametrize(
    ("window", "steps", "profiled"),
    [([2, 3], [1, 2], ["step 2"]), ([2, 3], [3, 4], ["step 3"]), ([2, 3], [4, 5], None), ([], [1, 2], None)],
)
def test_a_run_that_ends_or_begins_within_the_window_keeps_what_there_is(tmp_path, window, steps, profiled):
    window = window_of(tmp_path, steps=window)

    run(window, steps)
    window.close()

    path = tmp_path / "profile-rank0.json.gz"
    assert (steps_of(path) if path.exists() else None) == profiled


def test_with_memory_the_trace_has_curves_of_what_tensors_take_and_blocks_on_cuda_are_kept(tmp_path, monkeypatch):
    run(window_of(tmp_path, steps=[1, 1], memory=True), [1])
    run(window_of(tmp_path, rank=1, steps=[1, 1]), [1])

    curve, none = [
        [event["args"]["bytes"] for event in events_of(tmp_path / f"profile-rank{rank}.json.gz") if event["ph"] == "C"]
        for rank in (0, 1)
    ]
    assert max(curve) - min(curve) >= 80_000
    assert none == []
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"device": 0}])
    run(window_of(tmp_path, device=torch.device("cuda", 0), steps=[1, 1], memory=True), [1])
    assert json.loads(gzip.decompress((tmp_path / "memory-rank0.json.gz").read_bytes())) == [{"device": 0}]


def test_a_profile_that_cannot_be_written_is_told_and_ends_nothing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "penstock"):
        run(window_of(tmp_path / "none", steps=[1, 1]), [1, 2])

    assert "rank 0: the profile is lost: " in caplog.text
    assert "No such file or directory" in caplog.text


def test_allocations_in_a_trace_tell_what_tensors_take(tmp_path):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        held = torch.ones(1000)
        more = torch.ones(500)
        del held
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    counters = memory_counters(events)

    assert len(counters) >= 3
    assert {(counter["ph"], counter["name"]) for counter in counters} == {("C", "allocated, CPU")}
    sizes = [counter["args"]["bytes"] for counter in sorted(counters, key=lambda counter: counter["ts"])]
    assert [later - earlier for earlier, later in pairwise(sizes)][:2] == [2000, -4000]
    assert more.nbytes == 2000
