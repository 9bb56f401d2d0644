"""Compile one row of a program with parts that say what they were asked to do."""

from types import SimpleNamespace

from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.losses.step_losses import StepLosses
from penstock.execute.ops.context import CompileContext
from penstock.execute.ops.rows import RankRows
from penstock.execute.step import Step


def row_of(program, text, rank=0):
    """Return the row of a rank with this text."""
    rows = range(*program.offsets[rank : rank + 2])
    return next(row for row in rows if str(program.instruction(row)) == text)


class SayingMessenger:
    """Notes what it is asked to do."""

    launches_groups = False

    def __init__(self, said):
        self._said = said

    def __getattr__(self, name):
        if name in ("layouts", "sender", "receiver"):
            return self
        if name == "transport":
            return "wires"

        def call(*args):
            self._said.append((name, *args))
            return name

        return call


class SayingPasses:
    """A stage that notes what it is asked to run, and returns the names of what it would return, or given outputs."""

    def __init__(self, said, outputs="outputs"):
        self._said = said
        self._outputs = outputs

    def forward(self, step, place, inputs, keywords):
        self._said.append(("forward", place, inputs, dict(keywords)))
        return self._outputs, "saved"

    def backward(self, saved, gradients):
        self._said.append(("backward", saved, gradients))
        return "gradients"

    def backward_input(self, saved, gradients):
        self._said.append(("backward input", saved, gradients))
        return "gradients", "left"

    @property
    def gradients(self):
        return SimpleNamespace(add=lambda inputs: self._said.append(("backward weight", inputs)))

    @property
    def stage(self):
        return SimpleNamespace(modules=[self], takes_microbatch_place=False)


class SayingParameters:
    """Parameters that note what they are asked to do."""

    def __init__(self, said, stages):
        def note(what):
            # None, as a layout returns whose reductions are over at once
            return lambda *args, is_last=True: said.append((what, *args)) if is_last else None

        layout = SimpleNamespace(
            launches=False,
            reduces_in_backward=False,
            unshard=note("unshard"),
            reshard=note("reshard"),
            reduce=note("reduce stage"),
        )
        self.unit_of = {stage: SimpleNamespace(layout=layout, gradients=None) for stage in stages}
        self.reduce_stage = None
        self.step_optimizer = note("optimizer step")
        self.copies = {group: SimpleNamespace(ranks=(), reduce=note("reduce tied")) for group in range(2)}

    def store_of(self, copy):
        return "store"


def context_of(program, rank=0, said=None, *, passes=None, row_of=None):
    """Return what the compile functions look at; calls are noted in `said`."""
    said = [] if said is None else said
    stages = program.placement.stages_of_rank[rank]
    passes = passes or {stage: SayingPasses(said) for stage in stages}
    rows = RankRows.of(program, rank)
    return CompileContext(program, rank, rows, passes, SayingMessenger(said), SayingParameters(said, stages), row_of)


def step_for(context):
    """Return a step with the data `data M` for microbatch M."""
    program = context.program
    slices = [
        [Microbatch(index, (f"data {index}.{part}",), {"mask": index}, None, 1) for part in range(program.num_slices)]
        for index in range(program.num_microbatches)
    ]
    return Step(slices, StepLosses(program.num_microbatches, program.num_slices))


def run_calls(bounds, step):
    """Run the calls of a row."""
    for bound in bounds:
        bound.call(step)
