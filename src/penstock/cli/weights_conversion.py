"""Weights with the names of a transformers model, written as transformers saves them."""

from contextlib import suppress
from pathlib import Path

from penstock.errors import ConfigError, count_of


def convert_to_pretrained(source: Path, target: Path, like: Path, *, is_forced: bool) -> str:
    """Write the weights of a checkpoint, run folder or file into a folder that `from_pretrained` loads; say what it is.

    Configuration and tokenizer files are those of the folder `like`.

    Raises:
        ConfigError: the target is not free, or `like` is no model of transformers.
        CheckpointError: there are no weights, or they are not of this model.
        NotSaved: a file cannot be written.
    """
    from penstock.hugging_face import source as sources
    from penstock.hugging_face.pretrained_out import convert_weights

    _require_free(target, is_forced=is_forced)
    try:
        model = sources.on_meta(like, sources.folder_of(like))
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix(f"{error.key}: "), key="--like") from error
    is_new = not target.exists()
    target.mkdir(exist_ok=True)
    try:
        where = convert_weights(source, target, model, like)
    except BaseException:
        if is_new:
            with suppress(OSError):
                target.rmdir()
        raise
    files = list(target.glob("model*.safetensors"))
    return f"{target}: {type(model).__name__} with the weights of {where}, in {count_of(len(files), 'file')}"


def _require_free(target: Path, *, is_forced: bool) -> None:
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a folder; make it first", key="OUT")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is not a folder; give another name", key="OUT")
    if not is_forced and target.is_dir() and any(target.iterdir()):
        raise ConfigError(
            f"{target} exists and is not empty; give another name, or --force to replace the model in it", key="OUT"
        )
