"""Which features the stages of a program have, and so how they run."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.stages.auxiliary import AddedLossPart, Auxiliary
from penstock.execute.stages.carried import Carrying, begin_slice
from penstock.execute.stages.feature import Copied, OutlivingPart, StageFeature, modules_with
from penstock.execute.stages.offloading import begin_movable, offloaded_places
from penstock.execute.stages.passes import PassOptions, StagePasses
from penstock.execute.stages.randomness import Randomness, RandomPart
from penstock.execute.stages.skips import SkipPart, StageSkips
from penstock.execute.stages.stage import Stage
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
) -> dict[int, StagePasses]:
    """Return how these stages run in a program; `skips` are by stage, where any concern it.

    `copied` are by stage whose weights are gathered, and copy what leaves it in their memory.
    """
    split, placement = program.split_stages, program.placement
    passes: dict[int, StagePasses] = {}
    for stage in stages:
        index = stage.index
        options = PassOptions(
            is_first=placement.previous_stage[index] == NONE,
            is_last=placement.next_stage[index] == NONE,
            is_training=not program.is_forward_only,
            is_split=index in split,
        )
        features = list(_features(program, stage, skips.get(index), randomness, copied.get(index)))
        passes[index] = StagePasses(stage, options, gradients[index], features)
    return passes


def _features(
    program: Program, stage: Stage, skips: StageSkips | None, randomness: Randomness, copied: Copied | None
) -> Iterator[StageFeature]:
    """Yield the features of a stage, outermost first: their order is that of autograd's roots."""
    if copied is not None:
        yield lambda step, place: OutlivingPart(copied)
    if places := offloaded_places(program, stage.index):
        yield partial(begin_movable, places, program.placement.previous_stage[stage.index] == NONE)
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
