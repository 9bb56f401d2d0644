"""A call that some ranks make alone, as in `if pipeline.rank == 0: save_checkpoint(...)`: one error on all ranks."""

import math
import re
import time
from functools import partial
from inspect import isfunction, signature
from itertools import permutations, product

import pytest
from torch import nn

import penstock as ps
from penstock.checkpoints.pretrained import load_weights
from penstock.checkpoints.weight_files import require_saveable, save_weights
from penstock.checkpoints.writer import CheckpointWriter
from penstock.errors import EndOfData, PeerLeft, PeerLost, PipelineError, StepRefused
from penstock.execute.model_part import ModelPart
from penstock.execute.transport.local import LocalTransport
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import MAX_WAIT_S, WIDTH, error_of, float_layers, on_ranks, square_loss, values
from tests.support.mesh_pipelines import on_mesh

INPUTS, TARGET = values(1, 4, WIDTH), values(2, 4, WIDTH)
AT_ONCE_S = MAX_WAIT_S / 4
"""A wait for a rank that does not come would last the deadline."""
CALLS = {
    "step": lambda own, folder: own.step(INPUTS, target=TARGET),
    "evaluate": lambda own, folder: own.evaluate(INPUTS, target=TARGET),
    "memory_report": lambda own, folder: own.memory_report(INPUTS, target=TARGET),
    "find_not_finite": lambda own, folder: own.find_not_finite(INPUTS, target=TARGET),
    "clip_grad_norm_": lambda own, folder: own.clip_grad_norm_(1.0),
    "norms": lambda own, folder: own.norms(),
    "state_dict": lambda own, folder: own.state_dict(on_rank=0),
    "load_state_dict": lambda own, folder: own.load_state_dict(own.state_dict()),
    "save_checkpoint": lambda own, folder: ps.save_checkpoint(folder, own, step=1),
    "load_checkpoint": lambda own, folder: ps.load_checkpoint(folder, own),
    "latest_checkpoint": lambda own, folder: ps.latest_checkpoint(folder, own),
}
FUNCTIONS = {"save_checkpoint", "load_checkpoint", "latest_checkpoint"}
"""Those of `CALLS` that are no methods."""
FEW = ("step", "clip_grad_norm_", "state_dict", "save_checkpoint")
"""Of each kind one: those that begin with a hop of their replica, and those that begin with both hops."""
OTHERS = {
    "profile": lambda own, folder: own.profile(INPUTS, target=TARGET),
    "CheckpointWriter.save": lambda own, folder: CheckpointWriter(folder, own).save(1),
    "save_weights": lambda own, folder: save_weights(folder, own),
    "load_weights": lambda own, folder: load_weights(folder, own),
    "require_saveable": lambda own, folder: require_saveable(own),
    "require_equal_copies": lambda own, folder: own.require_equal_copies(),
}


def pipeline_on(wires):
    """Return a pipeline over a transport, over the places of a mesh, or over the processes of a group."""
    place = {"transport" if isinstance(wires, LocalTransport | None) else "mesh": wires}
    return Pipeline(float_layers(num_layers=4), "1f1b", 2, square_loss, **place)


def said(name, ranks, *, is_first=False):
    """What an error says of ranks that are in a call, with the line that makes it here."""
    verb = "" if not is_first else " is" if len(ranks) == 1 else " are"
    numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"{numbers}{verb} in {name} (test_lone_calls.py:{(CALLS | OTHERS)[name].__code__.co_firstlineno})"


def outcomes_of(wires, folder, pairs):
    """Return, per pair of calls, what each rank raised when one rank made the first and the others the second.

    The ranks take turns to be the one. After each pair, all of them run a common step.
    """
    own, found = pipeline_on(wires), []
    rank, num_ranks = own.control.rank, own.control.num_ranks
    for index, (lone, common) in enumerate(pairs):
        begin_s = time.monotonic()
        error = error_of(CALLS[lone if rank == index % num_ranks else common], own, folder)
        took_s = time.monotonic() - begin_s
        found.append((type(error), str(error), error.rank, float(own.step(INPUTS, target=TARGET).loss), took_s))
    return found


def expected_words(pair, lone_rank, num_ranks):
    lone, common = pair
    others = [rank for rank in range(num_ranks) if rank != lone_rank]
    calls = [(lone, [lone_rank]), (common, others)] if lone_rank == 0 else [(common, others), (lone, [lone_rank])]
    is_tie = num_ranks == 2
    fix = calls[0][0] if is_tie and calls[0][0] != "step" else calls[1][0] if is_tie else lone
    words = ", ".join(said(*call, is_first=call is calls[0]) for call in calls)
    return f"{words}; every rank must call {fix}"


def assert_one_error(of_ranks, pairs):
    num_ranks = len(of_ranks)
    for index, (pair, outcomes) in enumerate(zip(pairs, zip(*of_ranks, strict=True), strict=True)):
        kinds, texts, blamed, losses, seconds = zip(*outcomes, strict=True)
        assert set(kinds) == {StepRefused}
        assert set(map(without_places, texts)) == {expected_words(pair, index % num_ranks, num_ranks)}
        assert len(set(blamed)) == 1
        assert len(set(losses)) == 1
        assert max(seconds) < AT_ONCE_S


def without_places(text):
    """Remove the places along a mesh that the name of a rank has there."""
    return re.sub(r" \(pipeline \d+, data \d+\)", "", text)


def run_on(shape):
    """Return a function that runs a case on the ranks of a line, or of a mesh, whose agreement has two hops."""
    return partial(on_ranks, shape[0]) if shape[1] == 1 else partial(on_mesh, *shape)


@pytest.mark.parametrize(
    ("shape", "calls"), [((2, 1), CALLS), ((4, 1), CALLS), ((2, 2), FEW), ((1, 3), FEW), ((3, 2), FEW)]
)
def test_all_ranks_name_the_calls_of_every_pair_and_run_the_next_step(shape, calls, tmp_path):
    pairs = list(permutations(calls, 2))

    assert_one_error(run_on(shape)(outcomes_of, tmp_path, pairs), pairs)


def outcomes_on_process(rank, folder, pairs):
    return outcomes_of(None, folder, pairs)


def test_processes_do_the_same(two_ranks, tmp_path):
    pairs = list(permutations(FEW, 2))

    assert_one_error(two_ranks.run(outcomes_on_process, tmp_path, pairs), pairs)


@pytest.mark.parametrize("name", OTHERS)
def test_other_public_calls_carry_their_names_too(name, tmp_path):
    def case(wires):
        own = pipeline_on(wires)
        call = OTHERS[name] if wires.rank == 0 else CALLS["clip_grad_norm_"]
        return str(error_of(call, own, tmp_path)), float(own.step(INPUTS, target=TARGET).loss)

    is_step = name == "profile"  # a recorded step
    first = said(name, [0], is_first=True).replace(f"in {name}", "in step" if is_step else f"in {name}")
    fix = "clip_grad_norm_" if is_step else name
    (words, loss), other = on_ranks(2, case)
    assert words == f"{first}, {said('clip_grad_norm_', [1])}; every rank must call {fix}"
    assert other == (words, loss)


REFUSED = CALLS | {
    "profile": OTHERS["profile"],
    "profile_in_parts": lambda own, folder: own.profile(INPUTS, target=TARGET, split_backwards=True),
    "recorded step": lambda own, folder: own.step(INPUTS, target=TARGET, record=True),
    "memory_report_in_parts": lambda own, folder: own.memory_report(INPUTS, target=TARGET, split_backwards=True),
    "CheckpointWriter.save": OTHERS["CheckpointWriter.save"],
}


def reasons_of(wires, folder, error):
    """Return what each rank raised when one refused the call that the others made, and the losses of common steps."""
    pipeline, raised = pipeline_on(wires), []
    rank, num_ranks = pipeline.control.rank, pipeline.control.num_ranks
    for index, call in enumerate(REFUSED.values()):
        is_refusing = rank == index % num_ranks
        refusal = error_of(pipeline.refuse, error) if is_refusing else error_of(call, pipeline, folder)
        raised.append((type(refusal), str(refusal), refusal.rank, float(pipeline.step(INPUTS, target=TARGET).loss)))
    return raised


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (2, 2)])
def test_the_reason_of_a_refusal_reaches_ranks_in_whichever_call(shape, tmp_path):
    outcomes_of_ranks = run_on(shape)(reasons_of, tmp_path, PipelineError("planted"))

    num_ranks = len(outcomes_of_ranks)
    for index, outcomes in enumerate(zip(*outcomes_of_ranks, strict=True)):
        kinds, texts, blamed, losses = zip(*outcomes, strict=True)
        assert set(kinds) == {StepRefused}
        # A rank whose refusal meets a step is told its own reason in its own words.
        assert set(map(without_places, texts)) <= {f"rank {index % num_ranks} refuses the step: planted", "planted"}
        assert sum(text == "planted" for text in texts) <= 1
        assert len(set(blamed)) == len(set(losses)) == 1


def test_the_end_of_the_data_reaches_ranks_in_another_call_as_such(tmp_path):
    def case(wires):
        pipeline = pipeline_on(wires)
        if wires.rank == 0:
            return error_of(pipeline.refuse, EndOfData("no\tmore\nrows"))
        return error_of(CALLS["save_checkpoint"], pipeline, tmp_path)

    for error in on_ranks(2, case):
        assert (type(error), str(error), error.rank) == (EndOfData, "no\tmore\nrows", 0)


def test_a_rank_that_goes_on_with_calls_of_its_own_is_met_in_its_next_common_one(tmp_path):
    def case(wires):
        own = pipeline_on(wires)
        if wires.rank == 0:
            return str(error_of(CALLS["save_checkpoint"], own, tmp_path))
        own.train(), own.state_dict(), own.describe_split(), list(own.parameters())
        return str(error_of(CALLS["step"], own, tmp_path))

    words = f"{said('save_checkpoint', [0], is_first=True)}, {said('step', [1])}; every rank must call save_checkpoint"
    assert on_ranks(2, case) == [words, words]


def test_a_save_in_flight_outlasts_a_call_that_one_rank_makes_alone(tmp_path):
    def case(wires):
        own = pipeline_on(wires)
        writer = CheckpointWriter(tmp_path, own)
        writer.save(1)
        error_of(partial(writer.save, 2) if wires.rank == 0 else partial(CALLS["step"], own, tmp_path))
        return writer.finish()

    assert on_ranks(2, case) == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


# ---- ranks that have left


def leave(own):
    own.close()  # leaves


CLOSED = f"closed the pipeline (test_lone_calls.py:{leave.__code__.co_firstlineno + 1})"


@pytest.mark.parametrize(
    ("shape", "name"),
    [*product([(2, 1), (4, 1)], CALLS), *product([(2, 2)], FEW)],
)
def test_a_rank_that_has_closed_the_pipeline_is_named_by_the_others(shape, name, tmp_path):
    def case(wires):
        own = pipeline_on(wires)
        if own.control.rank == 1:
            return leave(own)
        begin_s = time.monotonic()
        # Twice, as what the first call left must not change the words of the second.
        errors = [error_of(CALLS[name], own, tmp_path) for _ in range(2)]
        assert time.monotonic() - begin_s < AT_ONCE_S
        assert {error.rank for error in errors} == {1}
        return {(type(error), without_places(str(error))) for error in errors}

    place = said(name, [0]).partition(" in ")[2]
    words = f"rank 1 has {CLOSED}, the others are in {place}; every rank must call {name}"
    found = run_on(shape)(case)
    assert found.pop(1) is None
    assert found == [{(PeerLeft, words)}] * (math.prod(shape) - 1)


class FailingOnce(nn.Module):
    """A layer whose first forward fails."""

    def __init__(self):
        super().__init__()
        self.has_failed = False

    def forward(self, x):
        if not self.has_failed:
            self.has_failed = True
            raise ValueError("planted")
        return x


def leave_after_failure(rank, waits_first):
    """Return what a rank said and raised in the step after a failed one, which rank 1 does not come to."""
    wires = rank if isinstance(rank, LocalTransport) else None
    layers = [FailingOnce(), *float_layers(num_layers=3)]
    own = Pipeline(layers, "1f1b", 2, square_loss, transport=wires, deadline_s=MAX_WAIT_S)
    assert isinstance(error_of(CALLS["step"], own, None), PipelineError)
    if own.rank == 1:
        time.sleep(0.3 * waits_first)
        return leave(own)
    time.sleep(0.3 * (not waits_first))
    begin_s = time.monotonic()
    error = error_of(CALLS["step"], own, None)
    return type(error), str(error), error.rank, time.monotonic() - begin_s


@pytest.mark.parametrize("waits_first", [False, True], ids=["before the others wait", "while they wait"])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_rank_that_leaves_after_a_failed_step_is_named_at_once_by_those_that_go_on(kind, waits_first, request):
    run = partial(on_ranks, 2) if kind == "threads" else request.getfixturevalue("two_ranks").run

    (error_type, text, rank, waited_s), _ = run(leave_after_failure, waits_first)

    assert (error_type, rank) == (PeerLost, 1)
    first, second, *_ = text.splitlines()
    assert first == "after a failed step the ranks could not start afresh"
    assert second == f"rank 1 has {CLOSED}; make a new one on all ranks"
    assert waited_s < AT_ONCE_S


def test_a_rank_that_an_error_takes_out_of_the_pipeline_is_named_with_the_error(tmp_path):
    def leave_or_step(wires):
        with pipeline_on(wires) as own:
            if wires.rank == 1:
                raise KeyError("planted")
            CALLS["step"](own, tmp_path)

    found, _ = on_ranks(2, lambda wires: str(error_of(leave_or_step, wires)))
    assert re.match(r"rank 1 has closed the pipeline \(test_lone_calls.py:\d+, after KeyError\), the others", found)


def refusals_after_close(wires, folder):
    pipeline = pipeline_on(wires)
    CALLS["step"](pipeline, folder)
    if pipeline.control.rank != 0:
        leave(pipeline)
        errors = [error_of(call, pipeline, folder) for call in (CALLS | OTHERS).values()]
    else:
        errors = [error_of(CALLS["clip_grad_norm_"], pipeline, folder)]
    return {(type(error), str(error), error.rank) for error in errors}


@pytest.mark.feature("H12")
@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (2, 2)])
def test_a_rank_that_has_closed_the_pipeline_blames_no_other_in_its_own_later_calls(shape, tmp_path):
    others, *closed = run_on(shape)(refusals_after_close, tmp_path)

    for rank, errors in enumerate(closed, start=1):
        ((kind, text, blamed),) = errors
        assert (kind, without_places(text)) == (PipelineError, f"rank {rank}: the pipeline is closed; make a new one")
        assert blamed == rank
    ((kind, text, _),) = others
    assert kind is PeerLeft
    assert CLOSED in text
    assert list(tmp_path.iterdir()) == []


# ---- new calls

LOCAL = {
    "parameters named_parameters train eval no_sync": "the layers of this rank",
    "copied_names owner_names timeline recording step_number layers_of_stage layer_weights units": "facts at hand",
    "rebuilt_names module_settings transport control describe_split target_ranks": "facts at hand",
}
"""Public names of a pipeline that exchange nothing, each with what they are about."""


def test_every_public_call_of_a_pipeline_carries_its_name_or_is_this_ranks_alone():
    """A new public method fails here until it is marked `collective`, or listed as local above."""
    public = {name: value for kind in (ModelPart, Pipeline) for name, value in vars(kind).items() if name[0] != "_"}
    marked = {name for name, value in public.items() if hasattr(value, "is_collective")}
    local = set(" ".join(LOCAL).split())

    assert public.keys() - marked - local - {"stages"} == {"refuse", "profile"}  # which carry the name of a step
    assert marked == {*CALLS, "close", "require_equal_copies"} - FUNCTIONS


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_same_call_of_two_pipelines_on_one_transport_is_one_error_that_tells_them_apart(num_ranks):
    def case(wires):
        first, second = pipeline_on(wires), pipeline_on(wires)
        one = second if wires.rank == 1 else first
        words = str(error_of(lambda: one.step(INPUTS, target=TARGET)))
        return words, [float(own.step(INPUTS, target=TARGET).loss) for own in (first, second)]

    place = f"(test_lone_calls.py:{case.__code__.co_firstlineno + 3})"
    firsts = "rank 0 is" if num_ranks == 2 else "ranks 0, 2 are"
    second = "step of pipeline 2 on the transport"
    fix = "step" if num_ranks == 2 else second
    words = f"{firsts} in step {place}, rank 1 in {second} {place}; every rank must call {fix}"
    for text, losses in on_ranks(num_ranks, case):
        assert text == words
        assert losses[0] == losses[1]


def test_a_rank_that_has_made_fewer_pipelines_on_its_transport_numbers_them_as_the_others_do():
    def case(wires):
        pipeline_on(wires)
        if wires.rank == 0:  # as if it had been interrupted in the end
            wires.calls.num_pipelines = 0
        own = pipeline_on(wires)
        return own.control.pipeline_number, float(own.step(INPUTS, target=TARGET).loss)

    (first, second) = on_ranks(2, case)
    assert first == second
    assert first[0] == 2


@pytest.mark.parametrize("name", ["step", "clip_grad_norm_"])
def test_a_pipeline_whose_transport_was_closed_with_another_one_says_so(name, tmp_path):
    def case(wires):
        first, second = pipeline_on(wires), pipeline_on(wires)
        first.close()
        return [str(error_of(CALLS[name], own, tmp_path)) for own in (first, second)]

    for rank, (of_closed, of_other) in enumerate(on_ranks(2, case)):
        assert of_closed == f"rank {rank}: the pipeline is closed; make a new one"
        assert f"rank {rank}: another pipeline on the transport was closed, and the transport with it" in of_other


def test_local_calls_of_a_pipeline_send_nothing():
    def case(wires):
        own = pipeline_on(wires)
        sent = []
        wires.post_send = lambda peer, *rest: sent.append(peer)
        for name in set(" ".join(LOCAL).split()):
            found = getattr(own, name)
            if callable(found) and name != "transport":
                found()
        return sent

    assert on_ranks(2, case) == [[], []]


def test_public_functions_with_a_pipeline_carry_their_names():
    """What `penstock` exports, and takes a pipeline, is a call of all ranks."""
    functions = [value for name in ps.__all__ if isfunction(value := getattr(ps, name))]
    taking = {each.__name__ for each in functions if "pipeline" in signature(each).parameters}

    assert taking == FUNCTIONS
    assert all(hasattr(getattr(ps, name), "is_collective") for name in taking)
