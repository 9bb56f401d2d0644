"""The section of a run's configuration for an adapter."""

from typing import Literal

from pydantic import Field

from penstock.models.decoder_config import Positive
from penstock.train.settings.section import Scalar, Section, Texts


class AdapterSection(Section):
    """An adapter of peft on the model of model.transformers; the model's own weights are frozen."""

    kind: Literal["none", "lora", "ia3", "vera"] = "none"
    """method of peft (extra `peft`); 'none': the model itself is trained"""
    folder: str = ""
    """folder of an adapter to begin with, in place of all other keys, which its settings are; empty: a new one"""
    rank: Positive = 8
    """rank of the matrices of 'lora' and 'vera'"""
    alpha: Positive = 16
    """scale of 'lora', which adds its product times alpha / rank"""
    targets: Texts = ()
    """ends of names of the modules that get an adapter, or 'all-linear'; empty: those that peft takes for the model"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """share of the inputs of 'lora' and 'vera' that is dropped in training"""
    train: Texts = ()
    """ends of names of modules that are trained as a whole, such as lm_head: `modules_to_save` of peft"""
    options: dict[str, Scalar] = Field(default_factory=dict)
    """other settings by the names that peft gives them, such as {use_dora = true} or {init_lora_weights = 'pissa'}"""

    @property
    def is_used(self) -> bool:
        """Whether an adapter is trained."""
        return self.kind != "none" or bool(self.folder)
