"""How a case ended."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """RIGHT, REFUSED by name, WRONG, or IMPOSSIBLE in plain torch; a case is drawn from its seed."""

    seed: int
    outcome: str
    reason: str = ""
    details: str = ""
    features: tuple = ()

    @property
    def command(self):
        """The command that runs this case again."""
        return f"python -m tests.random_cut_models --seeds {self.seed} --features {','.join(self.features)}"
