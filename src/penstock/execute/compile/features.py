"""Which features the stages of a program have, and so how they run."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.stages.auxiliary import AddedLossPart, Auxiliary
from penstock.execute.stages.carried import Carrying, begin_slice
from penstock.execute.stages.copy_stream import CopyStream
from penstock.execute.stages.feature import Copied, OutlivingPart, StageFeature, modules_with
from penstock.execute.stages.offloading import begin_movable, offloaded_places
from penstock.execute.stages.passes import PassOptions, StagePasses
from penstock.execute.stages.randomness import Randomness, RandomPart
from penstock.execute.stages.skips import SkipPart, StageSkips
from penstock.execute.stages.stage import Stage
from penstock.execute.stages.wrappers import fully_sharded_modules
from penstock.ir.deps import NONE
from penstock.ir.operations import BEGINS_KEEPING, RUNS_FORWARD
from penstock.ir.program import Program


def compose_stages(
    program: Program,
    stages: Sequence[Stage],
    skips: Mapping[int, StageSkips],
    randomness: Randomness,
    gradients: Mapping[int, GradientStore],
    copied: Mapping[int, Copied] = MappingProxyType({}),
    offloads: CopyStream | None = None,
) -> dict[int, StagePasses]:
    """Return the forward and backward passes of each of this rank's stages as a program runs them, by stage.

    Every mapping is by stage too. `gradients` has where each stage adds up its gradients. `skips` has the values that
    a stage hands on past other stages, where there are any. `copied` has, for each stage whose weights are gathered
    from shards, the function that copies outputs that share memory with these weights, since the weights are dropped.
    `offloads` are the copies of activations to the host and back, where they run beside the computations.
    """
    placement = program.placement
    passes_by_stage: dict[int, StagePasses] = {}
    for stage in stages:
        index = stage.index
        options = PassOptions(
            is_first=placement.previous_stage[index] == NONE,
            is_last=placement.next_stage[index] == NONE,
            is_training=not program.is_forward_only,
            # A split backward computes the gradients of inputs and of weights in two actions.
            is_split=index in program.split_stages,
            reduces_in_backward=bool(fully_sharded_modules(stage.modules)),
        )
        # Features run beside the layers of a stage: offloading, added losses, state of slices, skips, random numbers.
        features = list(_features(program, stage, skips.get(index), randomness, copied.get(index), offloads))
        passes_by_stage[index] = StagePasses(stage, options, gradients[index], features)
    return passes_by_stage


def _features(
    program: Program,
    stage: Stage,
    skips: StageSkips | None,
    randomness: Randomness,
    copied: Copied | None,
    offloads: CopyStream | None,
) -> Iterator[StageFeature]:
    """Yield the features of a stage, outermost first: their order is that of autograd's roots."""
    if copied is not None:
        yield lambda step, place: OutlivingPart(copied)
    if places := offloaded_places(program, stage.index):
        yield partial(begin_movable, places, program.placement.previous_stage[stage.index] == NONE, copies=offloads)
    if adding := modules_with(stage.modules, Auxiliary):
        yield lambda step, place: AddedLossPart(adding, step.losses, place)
    carrying = modules_with(stage.modules, Carrying) if program.num_slices > 1 else []
    if carrying:
        yield partial(begin_slice, stage.index, carrying, program.num_slices, copied)
    if skips is not None:
        yield lambda step, place: SkipPart(skips)
    runs_again = any(RUNS_FORWARD[op] and not BEGINS_KEEPING[op] for op in program.ops)
    if not program.is_forward_only and (randomness.seed is not None or runs_again):
        yield lambda step, place: RandomPart(randomness, step.number, place)
