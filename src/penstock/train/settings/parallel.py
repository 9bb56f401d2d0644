"""`[parallel]`: the replicas of a pipeline, and what they share out."""

from typing import Literal

from pydantic import Field

from penstock.lowering import NOT_SHARDED, Sharding
from penstock.models.decoder_config import Positive
from penstock.train.settings.sections import NotNegative, Section


class ParallelSection(Section):
    """How many replicas of the pipeline train as one job, and what they share out."""

    data: Positive = Field(
        default=1, description="replicas of the pipeline, each on its part of a batch; times pipeline.ranks processes"
    )
    shard: Literal["none", "optimizer", "full"] = Field(
        default="none",
        description="what replicas share out. 'none': each holds all; 'optimizer': weights, gradients and optimizer "
        "state, gathered once a step; 'full': the same, and few stages of a rank are whole at once",
    )
    residency: NotNegative = Field(
        default=2, description="with 'full', stages of a rank that are whole at once, at most; 0: all"
    )
    look_ahead: NotNegative = Field(
        default=1, description="computations before its first use that a gather of weights starts; 0: right before it"
    )

    @property
    def sharding(self) -> Sharding:
        """What of a schedule is gathered and dropped; one replica shares out nothing."""
        return NOT_SHARDED if self.data == 1 else Sharding(self.shard, self.residency or None, self.look_ahead)
