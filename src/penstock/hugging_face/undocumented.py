"""Uses of transformers that its documentation does not promise: first values, losses, and tensors of files.

Each function has a test in tests/hugging_face/test_undocumented.py, or test_undocumented_forwards.py beside it, that
says which fact changed.

    file                                            model
    layers.0.block_sparse_moe.experts.0.w1.weight ┐
    layers.0.block_sparse_moe.experts.1.w1.weight ├─► model.layers.0.mlp.experts.gate_up_proj
    ...                                           ┘   a `Conversion`: sources, and the converter of transformers
"""

import inspect
import math
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from penstock.models.cutting.stand_in import share_hooks


@dataclass(slots=True, eq=False)
class Conversion:
    """Tensors of files that become one tensor of the model, or several."""

    first: str
    """The target by which transformers calls it."""
    converter: Any = None
    """Of transformers; None where the source is the target."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Name in the files, and the converter's pattern that it matched; in the order in which tensors are joined."""

    def convert(self, tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
        """Return the targets by name; `tensors`, the sources by name, is emptied, so that each is freed early.

        Raises: Exception, of any type, where the sources do not fit together.
        """
        if self.converter is None:
            return {self.first: tensors.pop(self.sources[0][0])}
        converter = deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.first, name, pattern, tensors.pop(name))
        return _flat(converter.convert(self.first, model=model, config=model.config))


def conversions(model: Any, names: Iterable[str]) -> tuple[list[Conversion], dict[str, str]]:
    """Return how the tensors of files become those of a model, and the tensors of files that become none.

    `names` are the tensors in the files. transformers has rules by which older names are renamed, and tensors are
    joined or split, as experts are. A tensor that becomes none comes with the name that the model would have to have
    for it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    conversion_by_target: dict[str, Conversion] = {}
    unknown_targets: dict[str, str] = {}
    # Experts are joined in this order, and some rules wait for a name that comes first in it.
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:  # files that transformers 5 wrote without its rules
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, state)
        if target not in state:
            unknown_targets[name] = target
            continue
        conversion = conversion_by_target.setdefault(
            target, Conversion(target, None if pattern is None else converter_of_pattern[pattern])
        )
        conversion.sources.append((name, pattern or name))
    return list(conversion_by_target.values()), unknown_targets


def reverted(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what files hold for some tensors of a model, by their names in files.

    Names that share a file's tensor must be given together: else only a part of it comes back.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return _flat(revert_weight_conversion(model, dict(tensors)))


def tied_names(model: Any) -> dict[str, str]:
    """Return every tied parameter with the one that it is tied to."""
    return dict(model.all_tied_weights_keys)


def unsaved_names(model: Any) -> frozenset[str]:
    """Return the parameters and buffers that transformers leaves out of files, those that are tied apart."""
    return frozenset(model._keys_to_ignore_on_save or ())


def missing_and_strange(model: Any, missing: Collection[str], strange: Collection[str]) -> tuple[set[str], set[str]]:
    """Return which of these names transformers complains about: others may be missing, or are of no use."""
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(strange))
    model._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys


def is_quantized(config: Any) -> bool:
    """Whether files of this config hold quantized weights, which a quantizer of transformers reads."""
    return bool(config.to_dict().get("quantization_config"))


def _flat(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors by name, where an operation of transformers may leave a list of one."""
    with torch.no_grad():
        return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put each parameter that this thread registers onto the meta device, where it takes up no memory.

    Buffers stay real: those that no file has are made when a model is, some of them by a parent of their module.
    """
    thread = threading.get_ident()

    def bare(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None  # it stays as it is
        on_meta = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        on_meta.__dict__.update(vars(parameter))
        return on_meta

    handle = register_module_parameter_registration_hook(bare)
    try:
        with _LargeOnMeta():
            yield
    finally:
        handle.remove()


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors without values on the meta device: parameters, since a host may not have their memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            size = kwargs.get("size", args[0] if args and isinstance(args[0], Sequence) else args)
            kwargs |= {"device": "meta"} if math.prod(size) >= LARGE else {}
        return func(*args, **kwargs)


LARGE = 2**22
"""Elements of a large tensor; buffers without values, which a model fills later, are smaller."""


def copy_of_config(config: Any) -> Any:
    """Return a config of the same model, whose settings may be changed."""
    return config.__class__.from_dict(config.to_dict())


def dtype_of_config(config: Any) -> torch.dtype:
    """Return the type of the parameters that a config names, else torch's default."""
    return config.dtype or torch.get_default_dtype()


def class_of_config(library: Any, config: Any) -> Any:
    """Return the class that `config.architectures` names, where it is one of transformers; else a causal one.

    For a config of an encoder with a decoder that names none, it is the class that transformers has for these.
    """
    name = (getattr(config, "architectures", None) or [""])[0]
    architecture: Any = getattr(library, str(name), None)
    if isinstance(architecture, type) and issubclass(architecture, library.PreTrainedModel):
        return architecture
    is_seq2seq = getattr(config, "is_encoder_decoder", False)
    return library.AutoModelForSeq2SeqLM if is_seq2seq else library.AutoModelForCausalLM


def made_of_config(library: Any, config: Any, **settings: Any) -> Any:
    """Return a model of the class that a config is for."""
    model_class = class_of_config(library, config)
    if issubclass(model_class, library.PreTrainedModel):
        return model_class._from_config(config, **settings)
    return model_class.from_config(config, trust_remote_code=False, **settings)


def keep_in_float32(model: Any) -> None:
    """Give the tensors float32 that `from_pretrained` loads in it, whatever the type of the model is."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(model.dtype)
    if plan:
        pattern = build_glob_alternation(list(plan))[0]
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if pattern.search(name):
                tensor.data = tensor.data.float()


def state_names_of_class(model: Any) -> set[str] | None:
    """Return the names of the state that the class of a model makes of its config; None if it takes more than that."""
    try:
        with torch.device("meta"):
            return set(type(model)(deepcopy(model.config)).state_dict())
    except TypeError:
        return None


def checkpoints_gradients(model: nn.Module) -> bool:
    """Whether gradient_checkpointing_enable() was called: a setting of modules."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def forward_settings(model: Any) -> dict[str, Any]:
    """Return the settings with which a forward fills no cache and returns a mapping, as far as it takes them.

    Some forwards take them by **kwargs alone, and hand them to the model that they hold.
    """
    parameters = inspect.signature(model.forward).parameters
    # With a cache, transformers no longer sees where packed sequences end. The loss that balances experts is made of
    # results of the blocks (balance.py), not in the model's forward.
    wanted = {"use_cache": False, "return_dict": True, "output_router_logits": False}
    passed_on = set()
    if any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        has_cache = model.can_generate() or hasattr(model.config, "use_cache")
        passed_on = {"return_dict", "use_cache"} if has_cache else {"return_dict"}
    return {name: value for name, value in wanted.items() if name in parameters or name in passed_on}


def output_of(output: Any) -> Any:
    """Return the logits of an output, else the last hidden state, else the output as it is."""
    if not isinstance(output, Mapping):
        return output
    return output.get("logits", output.get("last_hidden_state", output))


def give_values(model: Any, modules: Sequence[nn.Module]) -> None:
    """Give first values to modules of which parameters have memory and no values, by the rules of their model.

    Of a `PreTrainedModel`, `_init_weights(module)` draws the parameters of one module, and makes its buffers that are
    not saved, such as the frequencies of rotary embeddings.
    """
    for module in reversed(modules):
        model._init_weights(module)


def collects_outputs(model: nn.Module) -> bool:
    """Whether modules of a model have hooks that collect outputs, as of hidden states, for the forward around them."""
    return any(vars(module).get("_output_capturing_hooks_installed", False) for module in model.modules())


def collect_outputs(model: Any) -> None:
    """Put hooks that collect outputs on the modules of a model, as the first forward that asks for outputs does."""
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    maybe_install_capturing_hooks(model)


def share_collecting_hooks(frame: nn.Module, device: torch.device) -> None:
    """Let stand-ins have the hooks by which a model collects outputs."""
    share_hooks(frame, lambda hook: getattr(hook, "__name__", "") == "output_capturing_hook")


def device_map_of(model: Any) -> Any:
    """Return on which device each module of a model was placed, if accelerate did: `hf_device_map`."""
    return getattr(model, "hf_device_map", None)


def router_class(model: Any) -> type[nn.Module] | None:
    """Return the class of the modules whose first output is a router's logits: `_can_record_outputs`."""
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    router = getattr(recorder, "target_class", recorder)
    return router if isinstance(router, type) and getattr(recorder, "index", 0) == 0 else None


@dataclass(frozen=True, slots=True)
class Routing:
    """What the loss that balances experts is made of."""

    router: type[nn.Module]
    """The class of the routers."""
    num_experts: int
    top_k: int
    """The number of experts that a token is sent to."""
    weight: float
    """The weight of the loss."""


def routing_of(model: Any) -> Routing | None:
    """Return what the loss of a model that balances its experts is made of; None where it has none that is known here.

    The file of such a model has `load_balancing_loss_func`, which its forward adds to the loss.
    """
    router = router_class(model)
    if router is None or not hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func"):
        return None
    if not hasattr(model, "num_experts"):
        return None
    return Routing(router, int(model.num_experts), int(model.num_experts_per_tok), float(model.router_aux_loss_coef))


NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""The names that configs have for the number of experts of a layer."""
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""The names that configs have for the number of experts that a token is sent to."""


def share_of_experts(config: Any) -> float:
    """Return the fraction of a layer's experts that a token is sent to; 1 where there are none.

    In a config of several models, the experts are those of the language model. Some have a number for each layer.
    """
    settings = config.get_text_config().to_dict()  # attributes may refuse to be read where layers differ
    num_experts, top_k = _largest(settings, NUM_EXPERTS), _largest(settings, TOP_K)
    return top_k / num_experts if num_experts and top_k else 1.0


def _largest(settings: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the first of some settings that is there, the largest where layers have their own; 0 where none is."""
    value = next((value for name in names if (value := settings.get(name))), 0)
    return max(value) if isinstance(value, Sequence) else int(value)


class LossKind(Enum):
    """What a model compares with its labels."""

    SHIFTED = "the logits at the position before each label"
    TOKENS = "the logits at the position of each label"
    CLASSES = "the logits of each row, by the problem_type of the config"
    UNKNOWN = "something else, or the model takes no labels"


def loss_kind(model: Any) -> LossKind:
    """Return of what kind the loss is that a class of transformers computes where it is given labels.

    Its forward calls `self.loss_function(logits, labels, ...)`, or computes a cross entropy itself: of tokens, unless
    it has losses for other problems of classifiers beside it. One that shifts labels itself is not taken.
    """
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if "labels" not in inspect.signature(model.forward).parameters:
        return LossKind.UNKNOWN
    if code is None or not type(model).__module__.startswith("transformers.") or "loss_function" in code.co_names:
        return _KIND_BY_FUNCTION.get(model.loss_function.__name__, LossKind.UNKNOWN)
    names = {*code.co_names, *code.co_varnames}
    if not names & {"CrossEntropyLoss", "cross_entropy"} or names & {"shift_logits", "shift_labels"}:
        return LossKind.UNKNOWN
    return LossKind.CLASSES if "problem_type" in names else LossKind.TOKENS


_KIND_BY_FUNCTION = {
    "ForCausalLMLoss": LossKind.SHIFTED,
    "ForMaskedLMLoss": LossKind.TOKENS,
    "ForTokenClassification": LossKind.TOKENS,
    "ForSequenceClassificationLoss": LossKind.CLASSES,
}
"""The kinds of the functions that `loss_function` of a model is."""
