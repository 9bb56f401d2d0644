"""`ps.cut`: a module of one's own as layers, in place, or with values from files where it has none.

A rank reads the headers of all files when the module is cut, and the tensors of a layer when it builds the layer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import overload

import torch
from torch import Tensor, nn

from penstock.checkpoints.content import SAME_MODEL
from penstock.checkpoints.pretrained import files_of, find_weights, require_weights
from penstock.checkpoints.shards import read_tensors
from penstock.errors import CheckpointError, ConfigError
from penstock.models.cutting.cut import CutSpec, require_cuttable
from penstock.models.cutting.cut import cut as cut_in_place
from penstock.models.cutting.from_meta import cut_from_meta
from penstock.models.cutting.part import CutPart
from penstock.models.cutting.points import saved_tensors


@overload
def cut(model: nn.Module, points: Sequence[str], *, weights: None = None) -> list[CutPart]: ...


@overload
def cut(model: nn.Module, points: Sequence[str], *, weights: str | Path) -> list[CutSpec]: ...


def cut(model: nn.Module, points: Sequence[str], *, weights: str | Path | None = None) -> list[CutPart] | list[CutSpec]:
    """Return a module as a list of layers for `Pipeline`, cut at submodules; the submodules are used in place.

    `points` are names of submodules, or patterns such as `"layers.*"`, in the order in which the forward calls them. A
    layer begins at each; what is computed before the first one is a layer too, if it has parameters. Submodules with
    parameters that are defined behind the first point are points themselves. Each layer runs the module's own forward
    from its point to the next, with stand-ins for what other layers have. Parameters keep their names.

    A batch is passed to the pipeline as to the module itself, on every rank: `pipeline.step(tokens, mask=mask,
    target=target)`.

    From a layer to the next goes the first argument of the point between them, and with it whatever later code needs of
    earlier submodules, parameters and random draws. What no stage could repeat is refused in the first step by name: a
    decision by a computed value, state that counts, containers that submodules fill.

    `weights` is for a module made under `torch.device("meta")`, which no rank could hold: a safetensors file, or a
    folder of some with their index, with the module's names. Each rank then reads the tensors of its own layers.
    Buffers that are not saved are made by the `reset_parameters` of their module.

    Raises:
        ConfigError: `points` are not submodules, or lie in one another; the module is on the meta device and has no
            `weights`, or a buffer that is not saved and cannot be made.
        CheckpointError: there are no weights, or those of another model.
    """
    if weights is None:
        return cut_in_place(model, points)
    require_cuttable(model)
    if not any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            'the model has values, which weights would replace; make it under torch.device("meta"), or call its '
            "load_state_dict and leave weights out",
            key="weights",
        )
    return cut_from_meta(model, points, _StoredWeights(Path(weights), model).read)


class _StoredWeights:
    """The tensors of files, by the names of a model that has no values of its own."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        """Compare names and shapes; no tensor is read. Raises: CheckpointError."""
        self._path = path
        self._files = files_of(find_weights(path))
        state = saved_tensors(model)
        aliases: dict[int, list[str]] = {}
        for name, tensor in state.items():
            aliases.setdefault(id(tensor), []).append(name)
        self._names = {name: self._names_in_files(aliases[id(tensor)]) for name, tensor in state.items()}
        expected = {name: tuple(state[name].shape) for names in self._names.values() for name in names}
        require_weights(path, expected)

    def read(self, name: str) -> Tensor:
        """Return a tensor; one with several names may be in the files under each. Raises: CheckpointError."""
        owner, *aliases = self._names[name]
        values = self._read(owner)
        for alias in aliases:
            if not torch.equal(values, self._read(alias)):
                raise CheckpointError(
                    f"{self._path}: {owner!r} and {alias!r} have other values, but the model ties them. {SAME_MODEL}"
                )
        return values

    def _read(self, name: str) -> Tensor:
        return read_tensors(Path(self._files[name]), [name])[name]

    def _names_in_files(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self._files] or [names[0]]
