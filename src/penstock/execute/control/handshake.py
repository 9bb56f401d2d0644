"""Compares fields that must be equal on all ranks, in the handshake of a construction and in each step."""

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
    """The text that tells a user how to make the field equal."""
    digest_of: str = ""
    """Name of the things that differ, where the values are digests, which say nothing to a user."""


def fix(text: str, *, digest_of: str = "") -> dict[str, Rule]:
    """Return the metadata of a field that must be equal on all ranks: its `Rule`.

    The name of the field is what a mismatch is named by. A field that may be None must be equal on the ranks where it
    is not: the others do not use what it describes.
    """
    return {"rule": Rule(text, digest_of)}


SAME_START = Rule("Start every rank with the same arguments and the same version")
SETTING_RULES = {
    "version": Rule("Install one version of Penstock for all ranks"),
    "layers": Rule("Give every rank the layers of the whole model"),
    "device": Rule("Give the stages of all ranks devices of one kind"),
}
"""Rules of the settings of a rank whose difference has a cause of its own; others differ by the arguments."""


def rules_of(kind: type) -> dict[str, Rule]:
    """Return the names of a dataclass's fields that must be equal on all ranks, and the rule of each."""
    return {entry.name: entry.metadata["rule"] for entry in fields(kind) if entry.metadata}


def require_equal(
    reports: Sequence[SetupReport],
    rank_names: RankNames | None = None,
    rules: Mapping[str, Rule] | None = None,
    fails_as: type[PipelineError] = PipelineError,
) -> None:
    """Make sure that a field has one value in the reports of all ranks, one field after another.

    `reports[rank]` has plain values by the name of the field. `rank_names` are the names of the ranks in errors, by
    default their indices. `rules` has the fields that are compared, and for each of them how a user mends a difference;
    by default all fields of the first report are compared, and a user is told to start all ranks alike. A rank whose
    value is None does not use the field.

    Raises:
        PipelineError: an error of the class `fails_as` names the first field that differs, and the ranks; all ranks,
            which have the same reports, raise the same error.
    """
    ranks = rank_names or RankNames.plain(len(reports))
    for field_name, rule in (rules or dict.fromkeys(reports[0], SAME_START)).items():
        values = [report.get(field_name, "nothing") for report in reports]
        value_by_rank = {rank: value for rank, value in enumerate(values) if value is not None}
        pair = odd_one_out(value_by_rank)
        if pair is None:
            continue
        # The error shows a rank with the value that most ranks have, and the first rank with another value.
        usual_rank, odd_rank = pair
        odd_value = value_by_rank.pop(odd_rank)
        alike = ", ".join(str(ranks.numbers[rank]) for rank, value in value_by_rank.items() if value == odd_value)
        difference = f"{ranks[usual_rank]} has {value_by_rank[usual_rank]}, {ranks[odd_rank]} has {odd_value}"
        if rule.digest_of:
            difference = f"{ranks[usual_rank]} and {ranks[odd_rank]} have different {rule.digest_of}"
        also = f" (and so do ranks {alike})" if alike else ""
        raise fails_as(
            f"the ranks disagree on {field_name}: {difference}{also}. {rule.fix}", rank=ranks.numbers[odd_rank]
        )


def odd_one_out(value_by_rank: Mapping[int, object]) -> tuple[int, int] | None:
    """Return a rank that has the value that most ranks have, and the first one that has not; None if all agree."""
    values = list(value_by_rank.values())
    if not values or values.count(values[0]) == len(values):
        return None
    usual_value = max(values, key=values.count)
    usual_rank = next(rank for rank, value in value_by_rank.items() if value == usual_value)
    return usual_rank, next(rank for rank, value in value_by_rank.items() if value != usual_value)


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """One rank's contribution to the facts that all ranks know."""

    keywords: Sequence[str] = ()
    """Names of the keyword arguments that the rank's layers take."""
    skips: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the skips that a layer sends or takes, by the index of the layer."""
    shared: Sequence[Sequence[str]] = ()
    """Pairs of names of one parameter, of a layer of this rank and one of another's."""
    host: str = ""
    """Text of the rank's host; ranks with equal texts understand each other's process ids."""
    clock_host: str = ""
    """Text of the rank's clock; ranks with equal texts read the same time."""
    positions: str = ""
    """Path of the memory that the rank offers for the positions of its host's ranks."""
    num_pipelines: int = 0
    """Number of pipelines that the rank has made on the transport before."""


@dataclass(frozen=True, slots=True)
class AgreedFacts:
    """The facts that all ranks know once they have found their setups equal; fields are those of `LocalFacts`."""

    of_rank: Sequence[LocalFacts]

    @classmethod
    def of(cls, reports: Sequence[SetupReport], names: RankNames | None = None) -> "AgreedFacts":
        """Compare the setups of all ranks and return their facts.

        Raises:
            PipelineError: naming the field and the ranks that differ; the same on every rank.
        """
        settings = [report["setup"] for report in reports]
        require_equal(settings, names, dict.fromkeys(settings[0], SAME_START) | SETTING_RULES)
        return cls([LocalFacts(**report["found"]) for report in reports])

    @property
    def keywords(self) -> frozenset[str]:
        return frozenset(name for facts in self.of_rank for name in facts.keywords)

    @property
    def skips(self) -> dict[int, Sequence[str]]:
        return {int(index): names for facts in self.of_rank for index, names in facts.skips.items()}

    @property
    def shared(self) -> list[tuple[str, str]]:
        return [(local_name, other_name) for facts in self.of_rank for local_name, other_name in facts.shared]

    def select(self, indices: Sequence[int]) -> "AgreedFacts":
        """Return the facts of some of the ranks."""
        return AgreedFacts([self.of_rank[index] for index in indices])

    def each(self, name: str) -> list[Any]:
        """Return one field of every rank, in rank order."""
        return [getattr(facts, name) for facts in self.of_rank]


def setup_report(settings: Mapping[str, str | None], facts: LocalFacts) -> SetupReport:
    """Return the report of a rank, as plain values."""
    return {"setup": settings, "found": asdict(facts)}
