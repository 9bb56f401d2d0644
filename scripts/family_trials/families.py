"""The families of transformers that are tried: how each is made tiny, and a batch of its kind.

decoder           all models of AutoModelForCausalLM that have no images       `llama`
seq2seq           encoders with decoders                                       `seq2seq:t5`
masked, image     encoders of text and of images                               `masked:bert`, `image:vit`
vision-language   an encoder of images before a decoder                        `vision-language:llava`
"""

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scripts.family_trials.tiny_configs import EXTRA, IMAGE_TOKEN, settings_of

DECODER, SEQ2SEQ, MASKED, IMAGE, VISION_LANGUAGE = "decoder", "seq2seq", "masked", "image", "vision-language"
AUTO_CLASSES = {
    DECODER: "AutoModelForCausalLM",
    SEQ2SEQ: "AutoModelForSeq2SeqLM",
    MASKED: "AutoModelForMaskedLM",
    IMAGE: "AutoModelForImageClassification",
    VISION_LANGUAGE: "AutoModelForImageTextToText",
}
LEFT_OUT = {
    "blt": "its tiny form needs other code",
    "dots3_note": "its settings of each layer have no tiny form",
    "dots3_note_text": "its settings of each layer have no tiny form",
    "gemma4_assistant": "it reads the states of another model",
    "gemma4_unified_assistant": "it reads the states of another model",
    "phi4_multimodal": "its encoders of images and sound have no tiny form",
    "git": "it puts an image before each text",
    "qwen4_exp": "its default config makes no model",
    "qwen4_exp_text": "its default config makes no model",
    "reformer": "its embeddings of positions have no tiny form",
}
"""Decoders that are not tried, and why."""
OTHERS = {
    SEQ2SEQ: (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "fsmt", "led", "longt5", "m2m_100", "marian"),
        *("mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "switch_transformers"),
        *("t5", "t5gemma", "umt5"),
    ),
    MASKED: (
        *("albert", "bert", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "ernie"),
        *("esm", "eurobert", "megatron-bert", "modernbert", "mpnet", "nomic_bert", "rembert", "roberta"),
        *("roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl"),
    ),
    IMAGE: ("beit", "clip", "dinov2", "dinov2_with_registers", "ijepa", "siglip", "vit", "vit_msn"),
    VISION_LANGUAGE: ("gemma3", "internvl", "llava", "mistral3", "paligemma", "qwen2_5_vl", "qwen3_vl", "smolvlm"),
}
ROWS, LENGTH, NUM_CLASSES, PATCHES = 4, 12, 5, 16
BEGIN_OF_SECOND = 5
"""The position at which the second document of a packed row begins."""


@dataclass(frozen=True, slots=True)
class Family:
    """One model class of transformers."""

    kind: str
    model_type: str

    @property
    def name(self) -> str:
        """Return the name on the command line and in the table."""
        return self.model_type if self.kind == DECODER else f"{self.kind}:{self.model_type}"

    @property
    def auto_class(self) -> Any:
        """Return the class of transformers that makes and loads models of this kind."""
        import transformers

        return getattr(transformers, AUTO_CLASSES[self.kind])

    def model(self) -> Any:
        """Return a tiny model with random weights, which are larger than those that training begins with."""
        from transformers import CONFIG_MAPPING

        config_class = CONFIG_MAPPING[self.model_type]
        settings = settings_of(config_class, is_causal=self.kind == DECODER, **EXTRA.get(self.model_type, {}))
        if self.kind == IMAGE:
            settings["num_labels"] = NUM_CLASSES
        torch.manual_seed(0)
        model = self.auto_class.from_config(config_class(**settings))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.1)
        return model.train()


def families() -> list[Family]:
    """Return all families, decoders first; of those of one class only the first."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    type_by_class: dict[str, str] = {}
    for model_type, class_name in sorted(CLASSES.items(), key=lambda item: (not _is_named_after(*item), item[0])):
        if model_type not in LEFT_OUT and "ForConditionalGeneration" not in class_name:
            type_by_class.setdefault(str(class_name), model_type)
    types = sorted(name for name in type_by_class.values() if not name.startswith("musicgen"))
    return [Family(DECODER, name) for name in types] + [
        Family(kind, name) for kind, names in OTHERS.items() for name in names
    ]


def _is_named_after(model_type: str, class_name: str) -> bool:
    return class_name.lower().startswith(re.sub(r"[_-]|_text$", "", model_type))


@dataclass(frozen=True, slots=True, eq=False)
class TrialBatch:
    """The keywords of one forward, and its labels."""

    keywords: dict[str, Tensor]
    labels: Tensor


def batch_of(family: Family, model: Any, form: str) -> TrialBatch | None:
    """Return the batch of a form ("plain", "padded" or "packed"); None where the model takes no such batch."""
    generator = torch.Generator().manual_seed(3)
    if family.kind == IMAGE:
        images = torch.randn(ROWS, 3, 16, 16, generator=generator)
        return TrialBatch({"pixel_values": images}, torch.arange(ROWS) % NUM_CLASSES) if form == "plain" else None
    tokens = torch.randint(3, 90, (ROWS, LENGTH), generator=generator)
    keywords = {"input_ids": tokens}
    if family.kind == VISION_LANGUAGE:
        keywords = _with_images(family, model, tokens, generator)
    tokens = keywords["input_ids"]
    labels = tokens.clone()
    if family.kind == SEQ2SEQ:
        keywords["decoder_input_ids"] = torch.randint(3, 90, (ROWS, LENGTH - 3), generator=generator)
        labels = torch.randint(3, 90, (ROWS, LENGTH - 3), generator=generator)
    labels[0, :3] = -100
    parameters = inspect.signature(model.forward).parameters
    if form == "padded":
        if "attention_mask" not in parameters:
            return None
        mask = torch.ones_like(tokens)
        for row in range(ROWS):
            mask[row, tokens.shape[1] - row % 3 :] = 0
        keywords["attention_mask"] = mask
        if labels.shape == mask.shape:
            labels[mask == 0] = -100
    if form == "packed":
        if "position_ids" not in parameters or family.kind != DECODER:
            return None
        positions = torch.cat([torch.arange(BEGIN_OF_SECOND), torch.arange(LENGTH - BEGIN_OF_SECOND)])
        keywords["position_ids"] = positions.repeat(ROWS, 1)
    return TrialBatch(keywords, labels)


def _with_images(family: Family, model: Any, tokens: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the keywords of rows with an image each, of 16 patches of 4 by 4 pixels."""
    images = torch.randn(ROWS, 3, 16, 16, generator=generator)
    keywords: dict[str, Tensor] = {"input_ids": tokens, "pixel_values": images}
    num_tokens = PATCHES // 4
    if family.model_type in ("llava", "paligemma"):
        num_tokens = PATCHES
    if family.model_type.startswith("qwen"):
        keywords["pixel_values"] = torch.randn(ROWS * PATCHES, 3 * 2 * 4 * 4, generator=generator)
        keywords["image_grid_thw"] = torch.tensor([[1, 4, 4]]).repeat(ROWS, 1)
    if family.model_type == "mistral3":
        keywords["image_sizes"] = torch.tensor([[16, 16]]).repeat(ROWS, 1)
    if family.model_type == "smolvlm":
        keywords["pixel_values"] = images[:, None]
    image_tokens = torch.full((ROWS, num_tokens), IMAGE_TOKEN)
    keywords["input_ids"] = torch.cat([tokens[:, :2], image_tokens, tokens[:, 2 + num_tokens :]], 1)
    if num_tokens > LENGTH - 2:
        keywords["input_ids"] = torch.cat([tokens[:, :2], image_tokens, tokens[:, -4:]], 1)
    name_of_types = {"paligemma": "token_type_ids", "gemma3": "token_type_ids", "qwen3_vl": "mm_token_type_ids"}
    if family.model_type in name_of_types:
        keywords[name_of_types[family.model_type]] = (keywords["input_ids"] == IMAGE_TOKEN).long()
    return keywords
