"""Ranks wait longer where one of them may compile, and only there."""

import threading

import pytest
import torch
from torch import nn

from penstock.execute.control.agreement import AgreedStep, Mode, StepProposal
from penstock.execute.control.compilations import COMPILE_DEADLINE_S, MANY, Compilations
from penstock.execute.control.positions import State
from penstock.execute.transport import LocalTransport
from penstock.execute.transport.agreed_layouts import MAX_LAYOUTS
from penstock.execute.transport.places import Places
from tests.support.boards import boards_of_threads

pytestmark = pytest.mark.usefixtures("nothing_stays_compiled")

DEADLINE_S = 3.0


class Layer(nn.Module):
    def forward(self, features):
        return features.tanh()


class Within(nn.Module):
    """Holds a function that torch compiles."""

    def __init__(self):
        super().__init__()
        self.function = torch.compile(torch.tanh, backend="eager")


NAMED = torch.compile(torch.tanh, backend="eager")


class Naming(nn.Module):
    def forward(self, features):
        return NAMED(features)


def compiled_in_place():
    layer = Layer()
    layer.compile(backend="eager")
    return layer


class Ranks:
    """What two ranks say; the first one is looked at."""

    def __init__(self, *layers):
        (self.board,) = boards_of_threads(1)
        (self.transport,) = LocalTransport.create(1, DEADLINE_S)
        self.own = Compilations(Places.of(self.transport), self.board, layers)

    def step(self, run=lambda: None, *, other=0, inputs=1, mode=Mode.TRAIN, given=()):
        """Run a step, in which `run` is called, and return the limit of its waits."""
        told = [self.own.num_reported(), other]
        agreed = AgreedStep.of([StepProposal(mode=mode, inputs=inputs, num_compilations=each) for each in told])
        with self.own.in_step(agreed, given):
            run()
            return self.transport.deadline_s


def test_compiled_layers_are_known_wherever_they_are():
    wrapped = torch.compile(Layer(), backend="eager")
    for layer in (wrapped, compiled_in_place(), nn.Sequential(compiled_in_place()), Within(), Naming()):
        assert Ranks(layer).step() == COMPILE_DEADLINE_S, layer

    layer = Layer()
    ranks = Ranks(layer)
    layer.compile(backend="eager")
    assert ranks.step() == COMPILE_DEADLINE_S


def test_waits_are_longer_until_a_layout_has_run_without_a_compilation():
    layer = compiled_in_place()
    ranks = Ranks(layer)

    def run():
        layer(torch.ones(3))

    assert ranks.step(run) == COMPILE_DEADLINE_S  # it is compiled here
    assert ranks.step(run) == COMPILE_DEADLINE_S  # what the first step has learned may be compiled
    assert ranks.step(run) == DEADLINE_S
    assert ranks.step(run, inputs=2) == COMPILE_DEADLINE_S  # another layout
    assert ranks.step(run, inputs=1) == DEADLINE_S
    assert ranks.step(run, inputs=2) == DEADLINE_S
    assert ranks.step(run, mode=Mode.EVALUATE) == COMPILE_DEADLINE_S
    assert ranks.transport.deadline_s == DEADLINE_S


def test_only_the_last_layouts_are_kept_and_none_where_nothing_is_compiled():
    plain, ranks = Ranks(Layer()), Ranks(Layer())
    for inputs in range(MAX_LAYOUTS + 44):
        plain.step(inputs=inputs)
        ranks.step(other=1, inputs=inputs)
    ranks.step(other=1, inputs=100)

    assert not plain.own._settled_layouts
    assert len(ranks.own._settled_layouts) == MAX_LAYOUTS
    assert [ranks.step(other=1, inputs=inputs) for inputs in (100, 43, 200)] == [
        DEADLINE_S,
        COMPILE_DEADLINE_S,  # ran longest ago
        DEADLINE_S,
    ]


def test_a_rank_waits_for_others_that_compile_also_in_layouts_that_ran_before():
    ranks = Ranks(Layer())

    assert [ranks.step(inputs=inputs) for inputs in (1, 1, 2)] == [DEADLINE_S] * 3
    assert [ranks.step(other=told) for told in (1, 3, 3, 3)] == [COMPILE_DEADLINE_S] * 2 + [DEADLINE_S] * 2


def test_a_failed_step_shows_nothing():
    ranks = Ranks(Layer())
    with pytest.raises(KeyError):
        ranks.step({}.popitem, other=1)
    ranks.own.forget()

    assert [ranks.step(other=1) for _ in range(2)] == [COMPILE_DEADLINE_S, DEADLINE_S]
    assert ranks.transport.deadline_s == DEADLINE_S


def test_the_board_says_while_a_rank_compiles_and_where():
    ranks, states = Ranks(Layer()), []

    def backend(module, examples):
        states.append(ranks.board.read(0))
        return module.forward

    def run():
        ranks.board.note(5)
        torch.compile(Layer(), backend=backend)(torch.ones(2))
        states.append(ranks.board.read(0))

    ranks.step(run)

    assert [(each.state, each.row) for each in states] == [(State.COMPILING, 5), (State.RUNNING, 5)]
    assert ranks.own.num_reported() == 1  # of a function that was not seen in the layers, too


def test_ranks_that_are_threads_do_not_count_for_each_other():
    (board, _), transports = boards_of_threads(2), LocalTransport.create(2, DEADLINE_S)
    own = Compilations(Places.of(transports[0]), board, [])
    with own.in_step(AgreedStep.of([StepProposal(mode=Mode.TRAIN)]), ()):
        other = threading.Thread(target=lambda: torch.compile(Layer(), backend="eager")(torch.ones(4)))
        other.start()
        other.join()

    assert own.num_reported() == 0
    assert board.read(0).state is not State.COMPILING


def test_steps_that_always_compile_are_warned_of_once_with_their_shapes(told_warnings):
    ranks, layer = Ranks(Layer()), compiled_in_place()

    def step(rows):
        features = torch.ones(rows, 2)
        torch.compiler.reset()
        ranks.step(lambda: layer(features), inputs=rows, given=[features, "text", torch.ones(rows)])

    for number in range(3 * MANY):  # a step that compiles nothing begins the count anew
        ranks.step(lambda: None) if number % MANY == 0 else step(1)
    ranks.step(lambda: None)
    for rows in range(2, 2 + MANY):
        assert told_warnings() == []
        step(rows)
    for rows in range(9, 9 + MANY):
        step(rows)

    (told,) = told_warnings()
    assert f"in each of the last {MANY} steps" in told
    assert "the shapes (2, 2) and (2,); (3, 2) and (3,)" in told
