"""Compares the digests of copies of tied parameters, which ranks send each other in an agreement on a step."""

from collections.abc import Sequence

from penstock.errors import PipelineError
from penstock.execute.transport.rank_names import RankNames

CopyDigest = tuple[int, int, str, int]
"""Tied group, index of the parameter in it, its name on the rank, and the digest of its values."""


TREAT_COPIES_ALIKE = (
    "Change a parameter in the same way on every rank that holds it: the same optimizer, learning rate, weight decay "
    "and clipping. Where these are chosen by names, choose by pipeline.owner_names.get(name, name)"
)


def require_equal_digests(
    digests_of_ranks: Sequence[Sequence[CopyDigest]], names: RankNames, fails_as: type[PipelineError] = PipelineError
) -> None:
    """Make sure that all holders of a tied parameter hold the same values.

    Raises:
        PipelineError: `fails_as`, on every rank alike, naming the parameter and the ranks.
    """
    first_holder: dict[tuple[int, int], tuple[int, str, int]] = {}
    for rank, copies in enumerate(digests_of_ranks):
        for group, place, name, bits in copies:
            owner, owner_name, expected = first_holder.setdefault((group, place), (rank, name, bits))
            if bits != expected:
                raise fails_as(
                    f"{names[owner]} holds {owner_name!r}, and {names[rank]} its copy {name!r}, whose values differ; "
                    f"copies of a tied parameter must stay equal bit for bit. {TREAT_COPIES_ALIKE}",
                    rank=names.numbers[rank],
                )
