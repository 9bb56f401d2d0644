"""The files of weights in a folder that transformers saved a model in: which there are, and what their headers say."""

from pathlib import Path

from penstock.checkpoints.pretrained import weight_map
from penstock.checkpoints.shards import pickles_in
from penstock.errors import CheckpointError, nearest
from penstock.hugging_face.stored import Stored, stored_in

WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"


def stored_in_folder(folder: Path) -> tuple[dict[str, Stored], int]:
    """Return the tensors of a folder's files by name, and the bytes of all headers, which are all that is read.

    Raises: CheckpointError: no such folder, no weights in it, or a file is not as the index says.
    """
    listed = _listed_files(folder)
    headers: dict[str, dict[str, Stored]] = {}
    total = 0
    for file in sorted(set(listed.values())):
        headers[file], num_bytes = stored_in(folder / file)
        total += num_bytes
    found = {name: stored for header in headers.values() for name, stored in header.items()}
    for name, file in listed.items() if listed.keys() != {WHOLE} else ():
        if name not in headers[file]:
            raise CheckpointError(
                f"{folder / file}: has no {name!r}, which {INDEX} lists there.{nearest(name, headers[file])} Get both "
                "files anew, of the same model"
            )
        found[name] = headers[file][name]
    return found, total


def _listed_files(folder: Path) -> dict[str, str]:
    """Return the file of every tensor that the index of a folder lists; of a folder without one, its only file."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder; expected one with {WHOLE}, or with {INDEX}")
    if (folder / WHOLE).is_file():
        return {WHOLE: WHOLE}
    if (folder / INDEX).is_file():
        return weight_map(folder / INDEX)
    pickles = pickles_in(folder)
    hint = f"Its {pickles[0]} is not read: a pickle can run any code. " if pickles else ""
    raise CheckpointError(
        f"{folder}: holds no weights; expected {WHOLE}, or {INDEX}. {hint}Save the model with `save_pretrained` of "
        "transformers 5, or name a folder that it wrote"
    )
