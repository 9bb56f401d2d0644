"""The public names with their types, for type checkers and editors; the module itself loads each on first use."""

from penstock.checkpoints.loading import load_checkpoint as load_checkpoint
from penstock.checkpoints.writer import save_checkpoint as save_checkpoint
from penstock.errors import CheckpointError as CheckpointError
from penstock.errors import ConfigError as ConfigError
from penstock.errors import DeadlineExceeded as DeadlineExceeded
from penstock.errors import EndOfData as EndOfData
from penstock.errors import FormatError as FormatError
from penstock.errors import NotFinite as NotFinite
from penstock.errors import PartitionError as PartitionError
from penstock.errors import PeerLost as PeerLost
from penstock.errors import PenstockError as PenstockError
from penstock.errors import PenstockWarning as PenstockWarning
from penstock.errors import PipelineError as PipelineError
from penstock.errors import ScheduleError as ScheduleError
from penstock.errors import StepRefused as StepRefused
from penstock.execute.batch.microbatch import BatchSpec as BatchSpec
from penstock.execute.batch.microbatch import PreSplit as PreSplit
from penstock.execute.batch.microbatch import Replicate as Replicate
from penstock.execute.batch.microbatch import Split as Split
from penstock.execute.batch.stream import Stream as Stream
from penstock.execute.losses.output import LossOutput as LossOutput
from penstock.execute.observing.observer import Observer as Observer
from penstock.execute.split.wanted import wants_input_gradient as wants_input_gradient
from penstock.execute.split.wanted import wants_weight_gradient as wants_weight_gradient
from penstock.ir.action import Action as Action
from penstock.ir.action import Kind as Kind
from penstock.ir.program import Program as Program
from penstock.ir.recompute import with_recompute as with_recompute
from penstock.ir.schedule import Schedule as Schedule
from penstock.lowering import lower as lower
from penstock.models import AuxiliaryLoss as AuxiliaryLoss
from penstock.models import Carry as Carry
from penstock.models import LayerSpec as LayerSpec
from penstock.models import Skip as Skip
from penstock.pipeline import Pipeline as Pipeline
from penstock.placement import Placement as Placement
from penstock.planning import plan as plan
from penstock.proofs import check as check
from penstock.schedules import build as build
from penstock.simulation import Costs as Costs
from penstock.simulation import LayerCosts as LayerCosts
from penstock.simulation import simulate as simulate
from penstock.train.measuring.measure import measure_layers as measure_layers

__version__: str
