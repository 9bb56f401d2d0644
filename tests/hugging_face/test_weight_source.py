"""A source of weights brings what `save_pretrained` writes, each tensor by one rank, and holds one unit at a time."""

import re
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file

import penstock as ps
from penstock.errors import NotSaved, PeerLost, PipelineError
from tests.hugging_face.families import FAMILIES, batch_of, model_of
from tests.support.local_pipelines import error_of, on_ranks
from tests.support.memory import peak_bytes, reset_peak
from tests.support.mesh_pipelines import on_mesh

pytest.importorskip("transformers")

SHARDED = {"shard": "full"}


def saved(family, folder, **changes):
    """Save a model as transformers does; return its layers and the tensors of its files."""
    model_of(family, "eager" if family == "gemma2" else "sdpa", **changes).save_pretrained(folder)
    return ps.from_transformers(folder), files_of(folder)


def files_of(folder):
    return {name: value for file in Path(folder).glob("*.safetensors") for name, value in load_file(file).items()}


def on_places(ranks, replicas, case, *args):
    """Return what `case(options, *args)` returned on each rank; the options make a pipeline of that many ranks."""
    if replicas == 1:
        return on_ranks(ranks, lambda transport: case({"transport": transport}, *args))
    return on_mesh(ranks, replicas, lambda places: case({"mesh": places, **SHARDED}, *args))


def bring(options, layers):
    """Return the metadata of a source, the number of its rank, and what two loops over it yield."""
    with ps.Pipeline(layers, "1f1b", 4, **options) as pipeline:
        source = layers.weight_source(pipeline)
        first, second = list(source), dict(source)
        assert all(torch.equal(second[name], tensor) for name, tensor in first)
        assert all(tensor.is_contiguous() and not tensor.requires_grad for _, tensor in first)
        return source.metadata(), source.rank, first


def assert_files(found, expected):
    """Compare what all ranks brought with files, to the byte, and with the metadata, element for element."""
    metadata = found[0][0]
    brought = {name: tensor for _, _, pairs in found for name, tensor in pairs}
    assert brought.keys() == expected.keys()
    assert len(metadata) == len(expected)
    for name, tensor in expected.items():
        assert brought[name].dtype == tensor.dtype
        assert torch.equal(brought[name].view(torch.uint8), tensor.view(torch.uint8)), name
    for rank_metadata, rank, pairs in found:
        assert rank_metadata == metadata
        own = [(item.name, item.dtype, item.shape) for item in metadata if item.owners == (rank,)]
        assert own == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs]


QUICK = [("llama", 1, 1), ("gpt2", 2, 1), ("mixtral", 4, 1), ("phi3", 2, 2)]
SLOW = [
    pytest.param(family, ranks, replicas, marks=pytest.mark.slow if ranks == 2 else pytest.mark.full)
    for family in FAMILIES
    for ranks, replicas in ((1, 1), (2, 1), (4, 1), (2, 2))
    if (family, ranks, replicas) not in QUICK
]


@pytest.mark.feature("X55")
@pytest.mark.parametrize(("family", "ranks", "replicas"), [*QUICK, *SLOW])
def test_all_ranks_together_bring_the_tensors_of_the_files_each_once(tmp_path, family, ranks, replicas):
    layers, expected = saved(family, tmp_path)

    found = on_places(ranks, replicas, bring, layers)

    assert_files(found, expected)
    assert all(pairs for _, _, pairs in found[:ranks])
    assert not any(pairs for _, _, pairs in found[ranks:])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_tied_weight_comes_once_and_the_tensors_of_a_block_lie_side_by_side(tmp_path, replicas):
    layers, expected = saved("llama", tmp_path, tie_word_embeddings=True)

    found = on_places(2, replicas, bring, layers)

    assert_files(found, expected)
    blocks = [match[1] for item in found[0][0] if (match := re.match(r"model\.layers\.(\d+)\.", item.name))]
    assert list(dict.fromkeys(blocks)) == sorted(set(blocks), key=int)
    assert blocks == sorted(blocks, key=int)


def test_whole_replicas_leave_it_to_the_first_one(tmp_path):
    layers, expected = saved("llama", tmp_path)

    found = on_mesh(2, 2, lambda places: bring({"mesh": places}, layers))

    assert_files(found, expected)
    assert [len(pairs) > 0 for _, _, pairs in found] == [True, True, False, False]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loop_after_a_step_brings_what_the_step_has_made(tmp_path, replicas):
    layers, expected = saved("llama", tmp_path / "from")
    tokens, labels, _ = batch_of("plain")

    def case(options):
        with ps.Pipeline(layers, "1f1b", 4, **options) as pipeline:
            source = layers.weight_source(pipeline)
            before = {name: tensor.clone() for name, tensor in source}
            optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
            pipeline.step(tokens, target=labels)
            optimizer.step()
            layers.save_pretrained(pipeline, tmp_path / "to")
            return before, dict(source)

    found = on_places(2, replicas, case)

    trained = files_of(tmp_path / "to")
    for before, after in found[:2]:
        assert all(torch.equal(before[name], expected[name]) for name in before)
        assert all(torch.equal(after[name], trained[name]) for name in after)
        assert not any(torch.equal(before[name], after[name]) for name in after)


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_rank_holds_one_unit_beside_its_weights(tmp_path, ranks, replicas):
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 64}
    layers, expected = saved("mixtral", tmp_path, **sizes)
    largest_unit = 4 * 2 * 1024 * 256 * 4  # four experts, two matrices in one tensor of the model
    assert sum(tensor.nbytes for tensor in expected.values()) > 2 * 1.5 * largest_unit

    def case(options):
        with ps.Pipeline(layers, "gpipe", 4, **options) as pipeline:
            source = layers.weight_source(pipeline)
            for _ in source:  # what a first loop loads stays
                pass
            if source.rank == 0:
                reset_peak()
            start = peak_bytes()
            for _ in source:
                pass
            return peak_bytes() - start

    most = on_places(ranks, replicas, case)[0]

    assert most < 1.25 * largest_unit


@pytest.mark.parametrize("leaves", ["by an error", "by break"])
def test_replicas_are_told_that_an_owner_has_left_its_loop_and_the_next_update_is_whole(tmp_path, leaves):
    layers, expected = saved("llama", tmp_path)

    def send(source):
        for number, _ in enumerate(source):
            if source.rank == 0 and number == 3:
                if leaves == "by break":
                    return
                raise ConnectionError("the receiver is gone")

    def case(places):
        with ps.Pipeline(layers, "1f1b", 4, mesh=places, **SHARDED) as pipeline:
            source = layers.weight_source(pipeline)
            fails = source.rank == 2 or (source.rank == 0 and leaves == "by an error")
            return error_of(send, source) if fails else send(source), list(source)

    (own, _), (sent, _), (told, _), (untold, _) = found = on_mesh(2, 2, case)

    assert (type(own), sent, untold) == (ConnectionError if leaves == "by an error" else type(None), None, None)
    assert type(told) is PipelineError
    assert "rank 2 (pipeline 0, data 1): the loop over a weight_source waits for 'model.layers." in str(told)
    assert "but rank 0 (pipeline 0, data 0) has left it at 'model." in str(told)
    assert "Let every rank loop over the source again" in str(told)
    assert told.rank == 0
    brought = {name: tensor for _, pairs in found for name, tensor in pairs}
    assert all(torch.equal(brought[name], tensor) for name, tensor in expected.items())


def test_a_loop_within_another_one_is_refused_and_replicas_are_told(tmp_path):
    layers, _ = saved("llama", tmp_path)

    def case(places):
        with ps.Pipeline(layers, "1f1b", 4, mesh=places, **SHARDED) as pipeline:
            source, other = (layers.weight_source(pipeline) for _ in range(2))
            error = error_of(lambda: list(zip(source, other, strict=False)))
            return error, len(list(source))

    found = on_mesh(2, 2, case)

    for (error, _), told in zip(
        found, ["begins before an earlier one has ended"] * 2 + ["has left it at"] * 2, strict=True
    ):
        assert isinstance(error, PipelineError)
        assert told in str(error)
    assert [number > 0 for _, number in found] == [True, True, False, False]


def test_replicas_that_have_come_to_different_tensors_are_refused(tmp_path):
    layers, _ = saved("llama", tmp_path)

    def case(places):
        with ps.Pipeline(layers, "1f1b", 4, mesh=places, **SHARDED) as pipeline:
            source = layers.weight_source(pipeline)
            if pipeline.replica:
                source._units = source._units[1:]
            return error_of(list, source)

    for error in on_mesh(1, 2, case):
        assert isinstance(error, PipelineError)
        assert "end one loop before the next one begins, on every rank" in str(error)


def test_a_replica_that_is_lost_ends_the_loop_of_its_owner(tmp_path):
    layers, _ = saved("llama", tmp_path)

    def case(places):
        pipeline = ps.Pipeline(layers, "1f1b", 4, mesh=places, **SHARDED)
        source = layers.weight_source(pipeline)
        if pipeline.replica == 1:
            places.abort()
            return None
        return error_of(list, source)

    first, second, *_ = on_mesh(2, 2, case)

    assert isinstance(first, PeerLost)
    assert isinstance(second, PeerLost)


def test_a_replica_in_another_call_is_told_so(tmp_path):
    layers, _ = saved("llama", tmp_path)

    def case(places):
        with ps.Pipeline(layers, "1f1b", 4, mesh=places, **SHARDED) as pipeline:
            source = layers.weight_source(pipeline)
            return error_of(list, source) if pipeline.replica == 0 else error_of(pipeline.control.across, 0)

    for error in on_mesh(1, 2, case):
        assert "in the loop over a weight_source (" in str(error)


def test_a_pipeline_with_other_weights_than_at_first_is_refused(tmp_path):
    layers, _ = saved("llama", tmp_path)
    pipeline = ps.Pipeline(layers, "1f1b", 4, ranks=1)
    source = layers.weight_source(pipeline)
    pipeline.stages[0].modules[-1].to(torch.bfloat16)

    with pytest.raises(PipelineError, match=r"rank 0: the pipeline has weights of other names, types or shapes"):
        list(source)


def test_a_pipeline_of_another_model_and_a_model_with_more_than_its_class_are_refused_on_all_ranks(tmp_path):
    layers, _ = saved("llama", tmp_path / "one")
    other, _ = saved("gpt2", tmp_path / "other")
    adapted = ps.from_transformers(model_of("llama"))
    adapted.whole.lora = torch.nn.Linear(2, 2)

    def case(transport):
        with ps.Pipeline(layers, "1f1b", 4, transport=transport) as pipeline:
            return error_of(other.weight_source, pipeline), error_of(adapted.weight_source, pipeline)

    for foreign, beside in on_ranks(2, case):
        assert type(foreign) is NotSaved
        assert "is of another model, which also has 'model." in str(foreign)
        assert type(beside) is NotSaved
        assert "weight_source: the model has 'lora.weight', 'lora.bias', which LlamaForCausalLM" in str(beside)


class Receiver:
    """Takes an update as vLLM's engine for several sources does: within one start and finish, one part per owner."""

    def __init__(self):
        self.weights, self.awaited = {}, []

    def update_weights(self, items):
        self.awaited = [(item.name, item.dtype, item.shape) for item in items]

    def receive(self, name, tensor):
        assert (name, tensor.dtype, tuple(tensor.shape)) == self.awaited.pop(0)
        self.weights[name] = tensor.clone()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_owners_send_one_after_another_in_any_order_each_what_the_metadata_says(tmp_path, replicas, order):
    layers, expected = saved("mixtral", tmp_path)
    receiver, turns = Receiver(), {rank: Event() for rank in (*order, None)}
    turns[order[0]].set()
    next_owner = dict(zip(order, (*order[1:], None), strict=True))

    def case(options):
        with ps.Pipeline(layers, "1f1b", 4, **options) as pipeline:
            source = layers.weight_source(pipeline)
            if source.rank in order:
                assert turns[source.rank].wait(20)
                receiver.update_weights([item for item in source.metadata() if item.owners == (source.rank,)])
            for name, tensor in source:
                receiver.receive(name, tensor)
            if source.rank in order:
                assert receiver.awaited == []
                turns[next_owner[source.rank]].set()

    on_places(2, replicas, case)

    assert receiver.weights.keys() == expected.keys()
    assert all(torch.equal(receiver.weights[name], tensor) for name, tensor in expected.items())
