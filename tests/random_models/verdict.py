"""How a case ended."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """`equal`, `refused` by Penstock, `impossible` in plain torch, or `wrong`; a case is drawn from its seed."""

    seed: int
    outcome: str
    reason: str = ""
    details: str = ""

    @property
    def command(self):
        """What runs this case again."""
        return f"python -m tests.random_models --seed {self.seed} --cases 1"
