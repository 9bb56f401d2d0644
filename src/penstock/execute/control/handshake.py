"""Compares fields that must be equal on all ranks, in the handshake of a construction and in each step.

require_equal                  compares, field by field; a step is compared by it too (`agreement.py`)
SharedSettings, LocalFacts     what a rank says when it has built its layers
AgreedFacts                    what all ranks know then
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from penstock.errors import PipelineError
from penstock.execute.transport.rank_names import RankNames

SetupReport = Mapping[str, Any]
"""A rank's report of itself: plain values, by name."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The words for ranks that differ in a field."""

    fix: str
    """How a user makes it equal."""
    digest_of: str = ""
    """Where the values are digests, which say nothing to a user: the things that differ."""


def fix(text: str, *, digest_of: str = "") -> dict[str, Rule]:
    """Return the metadata of a field that must be equal on all ranks: its `Rule`.

    The name of the field is what a mismatch is named by. A field that may be None must be equal on the ranks where it
    is not: the others do not use what it describes.
    """
    return {"rule": Rule(text, digest_of)}


SAME_START = fix("Start every rank with the same arguments and the same version")


def rules_of(kind: type) -> dict[str, Rule]:
    """Return the names of a dataclass's fields that must be equal on all ranks, and the rule of each."""
    return {each.name: each.metadata["rule"] for each in fields(kind) if each.metadata}


def require_equal(
    everyone: Sequence[SetupReport],
    names: RankNames | None = None,
    rules: Mapping[str, Rule] | None = None,
    fails_as: type[PipelineError] = PipelineError,
) -> None:
    """Compare what the ranks say, name by name.

    `names` are those of the ranks, where they are not their indices. `rules` says which names are compared, by default
    all that the first rank says.

    Raises:
        PipelineError: `fails_as`, naming what differs and the ranks; the same on every rank.
    """
    ranks = names or RankNames.plain(len(everyone))
    for name, rule in (rules or dict.fromkeys(everyone[0], SAME_START["rule"])).items():
        found = [theirs.get(name, "nothing") for theirs in everyone]
        said = {rank: value for rank, value in enumerate(found) if value is not None}
        pair = odd_one_out(said)
        if pair is None:
            continue
        one, odd = pair
        alike = ", ".join(str(ranks.numbers[rank]) for rank in said if rank != odd and said[rank] == said[odd])
        differ = f"{ranks[one]} has {said[one]}, {ranks[odd]} has {said[odd]}"
        if rule.digest_of:
            differ = f"{ranks[one]} and {ranks[odd]} have different {rule.digest_of}"
        also = f" (and so do ranks {alike})" if alike else ""
        raise fails_as(f"the ranks disagree on {name}: {differ}{also}. {rule.fix}", rank=ranks.numbers[odd])


def odd_one_out(found: Mapping[int, object]) -> tuple[int, int] | None:
    """Of what ranks have, return a rank that has what most have and the first one that has not; None if all agree."""
    values = list(found.values())
    if not values or values.count(values[0]) == len(values):
        return None
    usual = max(values, key=values.count)
    one = next(rank for rank, value in found.items() if value == usual)
    return one, next(rank for rank, value in found.items() if value != usual)


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """How a rank was set up."""

    version: str = field(metadata=fix("Install one version of Penstock for all ranks"))
    schedule: str = field(metadata=SAME_START)
    layers: str = field(metadata=fix("Give every rank the layers of the whole model"))
    split: str = field(metadata=SAME_START)
    loss: str = field(metadata=SAME_START)
    reduction: str = field(metadata=SAME_START)
    count: str | None = field(metadata=SAME_START)
    """None where no loss is computed."""
    scale_loss: str = field(metadata=SAME_START)
    allow_ragged: str = field(metadata=SAME_START)
    specs: str = field(metadata=SAME_START)
    slice_dim: str = field(metadata=SAME_START)
    slice_specs: str = field(metadata=SAME_START)
    tied: str = field(metadata=SAME_START)
    optimizer_step: str = field(metadata=SAME_START)
    seed: str = field(metadata=SAME_START)
    check_batches: str = field(metadata=SAME_START)
    variable_shapes: str = field(metadata=SAME_START)
    main_gradients: str = field(metadata=SAME_START)
    debug: str = field(metadata=SAME_START)
    deadline_s: str = field(metadata=SAME_START)
    device: str = field(metadata=fix("Give the stages of all ranks devices of one kind"))
    """Its kind, such as cpu."""
    mesh: str = field(metadata=SAME_START)
    """How many replicas there are, and of how many ranks."""
    shard: str = field(metadata=SAME_START)
    """Whether they share out parameters, and how many stages are whole at once."""


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """One rank's contribution to the facts that all ranks know."""

    keywords: Sequence[str] = ()
    """That its layers take."""
    skips: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Per index of a layer, the names of the skips that it sends or takes."""
    shared: Sequence[Sequence[str]] = ()
    """Pairs of names of one parameter, of a layer of this rank and one of another's."""
    host: str = ""
    """Ranks of one host understand each other's process ids."""
    clock_host: str = ""
    """Ranks with one clock read the same time."""
    positions: str = ""
    """The path of the memory that it offers for the positions of its host's ranks."""


@dataclass(frozen=True, slots=True)
class AgreedFacts:
    """The facts that all ranks know once they have found their setups equal; fields are those of `LocalFacts`."""

    of_rank: Sequence[LocalFacts]

    @classmethod
    def of(cls, everyone: Sequence[SetupReport], names: RankNames | None = None) -> "AgreedFacts":
        """Compare the setups of all ranks and return what they found.

        Raises:
            PipelineError: naming the field and the ranks that differ; the same on every rank.
        """
        require_equal([theirs["setup"] for theirs in everyone], names, rules_of(SharedSettings))
        return cls([LocalFacts(**theirs["found"]) for theirs in everyone])

    @property
    def keywords(self) -> frozenset[str]:
        return frozenset(name for found in self.of_rank for name in found.keywords)

    @property
    def skips(self) -> dict[int, Sequence[str]]:
        return {int(index): names for found in self.of_rank for index, names in found.skips.items()}

    @property
    def shared(self) -> list[tuple[str, str]]:
        return [(one, other) for found in self.of_rank for one, other in found.shared]

    def select(self, indices: Sequence[int]) -> "AgreedFacts":
        """Return what some of the ranks found."""
        return AgreedFacts([self.of_rank[index] for index in indices])

    def each(self, name: str) -> list[Any]:
        """Return one field of every rank, in rank order."""
        return [getattr(found, name) for found in self.of_rank]


def setup_report(setup: SharedSettings, found: LocalFacts) -> SetupReport:
    """Return what a rank says of itself, as plain values."""
    return {"setup": asdict(setup), "found": asdict(found)}
