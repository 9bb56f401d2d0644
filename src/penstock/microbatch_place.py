"""`MicrobatchPlace`: what a layer is told of the microbatch that it works on, where its forward asks for it."""

from dataclasses import dataclass

MICROBATCH_PLACE = "microbatch_place"
"""The parameter by which a layer's forward asks for the record; no batch may pass a keyword of this name."""


@dataclass(frozen=True, slots=True)
class MicrobatchPlace:
    """The place of a microbatch, or of one of its slices, in its step: the value of `microbatch_place`.

    A stage passes it to each layer whose forward names a parameter `microbatch_place`. A forward that runs again gets
    an equal record.
    """

    index: int
    """Index of the microbatch in the step."""
    number: int
    """Number of microbatches of the step, in this replica; an evaluation of few rows may have fewer than a training
    step."""
    slice: int
    """Index of the slice of the sequence; 0 where the schedule has no slices."""
    weight: float
    """Factor of a loss of this microbatch or slice in the loss of the batch, by rows: with the reduction "mean" its
    share of the rows, and of a slice's positions in those of the sequence, in the batch of all replicas, so that all
    weights of a step add up to 1; with "sum" 1."""
