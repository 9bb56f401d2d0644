"""`hanayo`: stages in waves down the ranks and up again, one forward and one backward in turn (arXiv 2308.15762).

    4 ranks, 6 microbatches, 1 wave: the order of each rank

        0F0 0F1 0F2 0F3 7F0 7B0 0F4 7F1 7B1 0F5 7F2 7B2 7F3 7B3 0B0 7F4 7B4 0B1 7F5 7B5 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 6F0 1F3 6F1 6B0 1F4 6F2 6B1 1F5 6F3 6B2 1B0 6F4 6B3 1B1 6F5 6B4 1B2 6B5 1B3 1B4 1B5
        2F0 2F1 5F0 2F2 5F1 2F3 5F2 5B0 2F4 5F3 5B1 2F5 2B0 5F4 5B2 2B1 5F5 5B3 2B2 5B4 2B3 5B5 2B4 2B5
        3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4B0 3F4 3B0 4F4 4B1 3F5 3B1 4F5 4B2 3B2 4B3 3B3 4B4 3B4 4B5 3B5

With w waves a rank holds 2w stages, each 1/(2w) of its work. Microbatches run in rounds of at least p, as equal as can
be; in a round, all of them run wave 0, then all wave 1, and so on; backwards take the waves from last to first. On a
clock of one unit per action, the i-th of this sequence (from 0) runs the stage at place x of its wave (0..2p-1)

    forward     at 2x + 4i
    backward    at c + 2(2p-1-x) + 4i, with the smallest c at which each last stage has its forward just before

so every rank alternates forward and backward, and down-going and up-going stages, without a gap.
"""

import numpy as np

from penstock.errors import ConfigError, count_of
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.schedules.by_time import Times, orders_by_time
from penstock.schedules.family import Family, Shape
from penstock.schedules.options import Number, Options


def generate(shape: Shape, options: Options) -> Schedule:
    """Return Hanayo's schedule: the model goes down and up the ranks in waves, and each rank has two stages per wave.

    Each forward and backward gets a time, at which it would run if both took two units; each rank runs its actions in
    the order of these times. Microbatches enter in rounds (groups of at least as many as there are ranks), so that the
    first one of a round has come back to rank 0 when the last one has left it.
    """
    num_ranks, num_waves = shape.num_ranks, _num_waves(shape, options)
    rank, wave = np.arange(num_ranks), np.arange(num_waves)[:, None]
    place_in_wave = np.stack([rank, 2 * num_ranks - 1 - rank], axis=1)[:, None, :, None]  # [rank, 1, down or up, 1]
    # Microbatches in rounds of at least p, as equal as can be; a lone round may be smaller and then leaves gaps.
    num_rounds = max(1, shape.num_microbatches // num_ranks)
    begins = np.arange(num_rounds + 1) * shape.num_microbatches // num_rounds
    round_sizes = np.diff(begins)
    round_size = np.maximum(np.repeat(round_sizes, round_sizes), num_ranks)
    microbatch = np.arange(shape.num_microbatches)
    index_in_sequence = microbatch + (num_waves - 1) * np.repeat(begins[:-1], round_sizes)  # of wave 0

    # [rank, wave, down or up, microbatch]
    forward: Times = 2 * place_in_wave + 4 * (index_in_sequence + wave * round_size)[:, None, :]
    first_backward = 4 * num_ranks - 1 + 4 * int(round_size.max()) * (num_waves - 1)
    index_of_backward = (index_in_sequence + (num_waves - 1 - wave) * round_size)[:, None, :]
    backward: Times = first_backward + 2 * (2 * num_ranks - 1 - place_in_wave) + 4 * index_of_backward
    orders = orders_by_time(place_in_wave + 2 * num_ranks * wave[:, :, None], microbatch, forward, backward)
    placement = Placement.wave(num_ranks, shape.num_stages)
    return Schedule.from_arrays("hanayo", placement, orders, num_microbatches=shape.num_microbatches)


def _num_waves(shape: Shape, options: Options) -> int:
    per_rank, remainder = divmod(shape.num_stages, shape.num_ranks)
    if remainder or per_rank % 2:
        stages, ranks = count_of(shape.num_stages, "stage"), count_of(shape.num_ranks, "rank")
        stages_on_ranks = f"{stages} on {ranks}" if remainder else f"{count_of(per_rank, 'stage')} per rank"
        raise ConfigError(
            f"hanayo runs whole waves of 2 stages per rank, got {stages_on_ranks}; use an even number per rank, or "
            "give waves=",
            key="stages" if remainder else "stages_per_rank",
        )
    num_waves = options.number("waves", per_rank // 2)
    if per_rank != 2 * num_waves:
        raise ConfigError(
            f"{count_of(num_waves, 'wave')} of 2 stages per rank, got {per_rank}; give one of the two",
            key="waves",
        )
    return num_waves


FAMILY = Family(
    name="hanayo",
    summary="stages in waves down the ranks and up again, one forward and one backward in turn",
    source="Hanayo, arXiv 2308.15762",
    placement="wave",
    restrictions="an even number of stages per rank",
    bubble="(p-1)(B+W)/w for w waves and at least p microbatches",
    memory="2p + 2g(w-1) of 2w stages each, for rounds of g microbatches; g = p where p divides m",
    advice="smaller bubbles than 1f1b with one copy of the model, for 2w times the messages",
    generate=generate,
    stages_per_rank=(2, 0),
    stages_of_options=lambda options: 2 * options.number("waves", 1),
    options={"waves": Number("stages_per_rank / 2", "waves down the ranks and up again; each is 2 stages per rank")},
)
