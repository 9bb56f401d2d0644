"""Finding a checkpoint that is as it was written."""

import pickle

import pytest

from penstock.checkpoints import manifest
from penstock.checkpoints.manifest import MANIFEST, UnreadableFormat, manifest_bytes, read_manifest
from penstock.checkpoints.verification import candidates, find_newest, latest_checkpoint, newest_readable
from penstock.errors import CheckpointError
from penstock.execute.control.collectives import Control
from tests.support.local_pipelines import error_of, on_ranks
from tests.train.local_ranks import on_small_pipelines


def find(folder, num_ranks=2):
    return on_ranks(num_ranks, lambda wires: find_newest(Control(wires), folder))


def files_of(checkpoint):
    return sorted(path.name for path in checkpoint.iterdir())


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_newest_is_found_by_any_number_of_ranks_and_a_checkpoint_itself_may_be_named(folder, num_ranks):
    found = find(folder, num_ranks)

    assert {each.path for each in found} == {folder / "step-2"}
    assert (found[0].manifest.step, found[0].damaged) == (2, ())
    assert candidates(folder / "step-1") == [folder / "step-1"]
    renamed = (folder / "step-1").rename(folder / "other")
    assert [each.path for each in find(renamed, num_ranks)] == [renamed] * num_ranks


def test_a_folder_of_checkpoints_may_be_named_as_one(folder):
    within = folder.rename(folder.with_name("step-7"))

    assert candidates(within) == [within / "step-2", within / "step-1"]
    assert find(within)[0].path == within / "step-2"
    assert candidates(within / "step-2") == [within / "step-2"]
    (within / "step-2" / MANIFEST).unlink()
    assert candidates(within / "step-2") == [within / "step-2"], "a damaged one is not left out in silence"


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("number", "damage"), [(0, cut), (0, lambda path: path.unlink()), (1, lambda path: path.unlink()), (5, flip)]
)
def test_a_damaged_file_is_named_and_the_next_older_one_taken(folder, damage, number):
    path = folder / "step-2" / files_of(folder / "step-2")[number]
    damage(path)

    found = find(folder)

    assert {each.path for each in found} == {folder / "step-1"}
    assert len(found[0].damaged) == 1
    assert str(path) in found[0].damaged[0] or (path.name == MANIFEST and "holds no" in found[0].damaged[0])


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("extra", "itself"),
        (MANIFEST, "nothing"),
        (MANIFEST, "itself"),
        ("weights-00001-of-00002.safetensors", "itself"),
    ],
)
def test_a_link_to_nothing_in_the_newest_lets_the_older_one_be_taken(folder, name, target):
    link = folder / "step-2" / name
    link.unlink(missing_ok=True)
    link.symlink_to(link if target == "itself" else folder / target)

    found = find(folder)[0]

    assert found.path == folder / ("step-2" if name == "extra" else "step-1")
    assert len(found.damaged) == (name != "extra")


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_a_tensor_that_the_writer_dropped_is_found(folder, part):
    written = read_manifest(folder / "step-2")
    changed = written.model_dump()
    tensors = changed["weights"] if part == "weights" else changed["optimizer"]["state"]["norm.weight"]["tensors"]
    some = next(iter(tensors.values()))
    tensors["dropped"] = some
    (folder / "step-2" / MANIFEST).write_bytes(manifest_bytes(written.model_validate(changed)))

    found = find(folder)[0]

    assert found.path == folder / "step-1"
    assert "has nothing as " in found.damaged[0]
    assert "dropped" in found.damaged[0]


def test_a_file_of_tensors_that_the_manifest_does_not_list_is_found(folder):
    written = read_manifest(folder / "step-2")
    name = written.weights["norm.weight"].file
    files = {file: entry for file, entry in written.files.items() if file != name}
    (folder / "step-2" / MANIFEST).write_bytes(manifest_bytes(written.model_copy(update={"files": files})))

    found = find(folder)[0]

    assert found.path == folder / "step-1"
    assert f"{name}: is not among the files of {folder / 'step-2' / MANIFEST}" in found.damaged[0]


def test_all_are_named_where_none_verifies_and_a_folder_without_any_is_refused(folder, tmp_path):
    for step in (1, 2):
        (folder / f"step-{step}" / MANIFEST).unlink()

    errors = on_ranks(2, lambda wires: error_of(lambda: find_newest(Control(wires), folder)))

    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "none of 2 checkpoints is as it was written. Put back a copy that is whole" in str(errors[0])
    assert "step-1: holds no checkpoint.json" in str(errors[0])
    (tmp_path / "none").mkdir()
    with pytest.raises(
        CheckpointError, match=r"none: holds no checkpoint; expected folders step-N, .*latest_checkpoint"
    ):
        find(tmp_path / "none")


def latest(first, second):
    """Return what `latest_checkpoint` returns or raises on two ranks, each with a path of its own."""
    return on_small_pipelines(2, lambda pipeline: error_of(latest_checkpoint, (first, second)[pipeline.rank], pipeline))


def test_the_latest_checkpoint_is_the_one_that_rank_0_sees(folder, tmp_path):
    def latest_on(num_ranks, *paths):
        return on_small_pipelines(num_ranks, lambda pipeline: latest_checkpoint(paths[pipeline.rank], pipeline))

    (tmp_path / "empty").mkdir()
    nowhere = tmp_path / "nowhere"

    assert latest_on(1, str(folder / "step-1")) == [folder / "step-1"]
    for other in (folder, nowhere, None):
        assert latest_on(2, folder, other) == [folder / "step-2"] * 2
    assert latest_on(2, tmp_path / "empty", folder) == latest_on(2, nowhere, nowhere) == [None, None]
    assert not nowhere.exists()


def test_where_no_checkpoint_can_be_every_rank_is_told(folder, tmp_path):
    (tmp_path / "file").write_text("")

    errors = latest(tmp_path / "file", tmp_path / "file")
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert "file: is no folder" in str(errors[1])
    assert "TypeError" in str(latest(None, folder)[1])


def test_a_pickle_in_the_newest_is_refused_and_no_older_one_taken(folder):
    (folder / "step-2" / "extra.pkl").write_bytes(pickle.dumps({}))

    error = error_of(lambda: find(folder))

    assert isinstance(error, UnreadableFormat)
    assert "step-2: holds a pickle (extra.pkl)" in str(error)


@pytest.mark.parametrize("name", ["extra.pkl", "weights.pt"])
def test_a_pickle_and_a_newer_format_are_found_without_reading_tensors(folder, name, monkeypatch):
    for file in (folder / "step-2").glob("*.safetensors"):
        file.write_bytes(b"")
    assert newest_readable(folder) == folder / "step-2"

    (folder / "step-2" / name).write_bytes(pickle.dumps({}))
    assert f"holds a pickle ({name})" in str(error_of(lambda: newest_readable(folder)))
    (folder / "step-2" / name).unlink()
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 2)
    error = error_of(lambda: newest_readable(folder))
    assert isinstance(error, UnreadableFormat)
    assert "has format penstock-checkpoint 1" in str(error)


def test_a_damaged_newest_one_may_still_have_an_older_one_that_is_taken(folder):
    (folder / "step-2" / MANIFEST).write_bytes(b"{}")
    assert newest_readable(folder) == folder / "step-1"

    (folder / "step-1" / MANIFEST).unlink()
    error = error_of(lambda: newest_readable(folder))

    assert "none of 2 checkpoints is as it was written. Put back a copy that is whole" in str(error)
    assert newest_readable(folder / "none") is None
