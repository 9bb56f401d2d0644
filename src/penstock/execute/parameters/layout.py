"""`ParameterLayout`: how the parameters of one unit lie, in whole or in parts, and what a step does about it.

UNSHARD        launches a gather; the first computation of the stage behind it waits for its ticket
REDUCE_GRAD    launches a reduction; REDUCE_TIED, STEP and the end of the program wait for its ticket
RESHARD        drops what was gathered
"""

from typing import Protocol


class Ticket(Protocol):
    """Something that was launched."""

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            PipelineError: it has failed, or is late.
        """
        ...


class ParameterLayout(Protocol):
    """The parameters of a unit: of one stage, or of stages that share some."""

    @property
    def launches(self) -> bool:
        """Whether `unshard` and `reduce` return tickets; else they are done when they return."""
        ...

    def begin_step(self, *, is_synced: bool, sums_tied: bool, is_training: bool) -> None:
        """Begin a step; unless `is_synced`, replicas reduce none but those of tied parameters, if these are summed."""
        ...

    def unshard(self) -> Ticket | None:
        """Make the parameters whole."""
        ...

    def reshard(self) -> None:
        """Go back to this rank's part."""
        ...

    def reduce(self, stage: int, *, is_last: bool) -> Ticket | None:
        """Add up over the replicas what has come to the gradients of a stage; nothing comes behind the last one."""
        ...

    def after_step(self) -> None:
        """End a step that has succeeded."""
        ...

    def end_failed_step(self) -> None:
        """Leave nothing of a step behind."""
        ...


class Replicated:
    """Parameters that every replica holds as a whole, and nobody reduces."""

    launches = False

    def begin_step(self, *, is_synced: bool, sums_tied: bool, is_training: bool) -> None: ...

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def reduce(self, stage: int, *, is_last: bool) -> None: ...

    def after_step(self) -> None: ...

    def end_failed_step(self) -> None: ...
