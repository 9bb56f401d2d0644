"""Models as plain lists of layers: single-device code that knows nothing of pipelines."""

from penstock.models.auxiliary import AuxiliaryLoss
from penstock.models.carry import Carry
from penstock.models.cutting.cut import cut
from penstock.models.decoder import count_target_tokens, cross_entropy_loss, decoder_layers
from penstock.models.decoder_config import DecoderConfig
from penstock.models.layer import LayerSpec, count_parameters, embedding_names, saved_shapes
from penstock.models.skip import Skip, connect_skips

__all__ = [
    "AuxiliaryLoss",
    "Carry",
    "DecoderConfig",
    "LayerSpec",
    "Skip",
    "connect_skips",
    "count_parameters",
    "count_target_tokens",
    "cross_entropy_loss",
    "cut",
    "decoder_layers",
    "embedding_names",
    "saved_shapes",
]
