"""Where modules hold their parameters and submodules; nothing that a walk would find is overlooked."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from penstock.execute import undocumented_modules
from penstock.execute.stages.wrappers import is_first_fsdp, is_sharded
from penstock.execute.undocumented_modules import ModuleSnapshot, is_replicated, put_parameter


def some_layers():
    return [nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2)]


def rename_parameter(layers):
    layers[1].register_parameter("offset", layers[1].bias)
    del layers[1].bias


def move_parameter_to_next_module(layers):
    layers[0][1].register_parameter("bias", layers[0][0].bias)
    del layers[0][0].bias


CHANGES = {
    "a parameter is replaced": lambda layers: setattr(layers[1], "bias", nn.Parameter(torch.zeros(2))),
    "by converting, without setattr": lambda layers: layers[0].to_empty(device="meta"),
    "removed": lambda layers: setattr(layers[1], "bias", None),
    "renamed": rename_parameter,
    "moved to the next module": move_parameter_to_next_module,
    "added": lambda layers: layers[0][1].register_parameter("scale", nn.Parameter(torch.ones(1))),
    "a module is replaced": lambda layers: layers[0].__setitem__(0, nn.Linear(2, 2)),
    "added to a leaf": lambda layers: layers[0][1].add_module("inner", nn.Linear(2, 2)),
    "a weight is parametrized": lambda layers: nn.utils.parametrizations.weight_norm(layers[1]),
    "tables are exchanged": lambda layers: layers[1].__setstate__({**vars(layers[1]), **vars(nn.Linear(2, 2))}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_seen_but_values_and_what_is_frozen(change):
    layers = some_layers()
    snapshot = ModuleSnapshot(layers)
    layers[1].weight.requires_grad_(False)
    layers[0].load_state_dict({name: torch.ones_like(value) for name, value in layers[0].state_dict().items()})
    layers[0].double().eval()
    assert snapshot.is_current()

    CHANGES[change](layers)

    assert not snapshot.is_current()
    assert ModuleSnapshot(layers).is_current()


def test_parameters_are_those_of_the_layers_in_order_each_once():
    layers = some_layers()
    layers[1].weight = layers[0][0].weight

    found = ModuleSnapshot(layers).parameters

    assert list(map(id, found)) == list(dict.fromkeys(id(each) for layer in layers for each in layer.parameters()))


# ---- modules that reduce gradients by themselves


class Layer(nn.Module):
    """Has a frozen and an ignored parameter, and an ignored buffer."""

    def __init__(self):
        super().__init__()
        self.trained, self.frozen, self.ignored = (nn.Parameter(torch.zeros(2)) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.register_buffer("table", torch.zeros(2))
        self.register_buffer("own", torch.zeros(2))

    def forward(self, hidden):
        return hidden * self.trained


def wrapped(**options):
    layer = Layer()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, ["ignored", "own"])
    return DistributedDataParallel(layer, **options)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
def test_what_ddp_averages_and_broadcasts_and_whether_is_known(world):
    module = wrapped()

    assert [each is module.module.trained for each in undocumented_modules.averaged_parameters(module)] == [True]
    assert [each is module.module.table for each in undocumented_modules.broadcast_buffers(module)] == [True]
    assert undocumented_modules.broadcast_buffers(wrapped(broadcast_buffers=False)) == []
    with module.no_sync():
        assert not undocumented_modules.averages(module)
    assert undocumented_modules.averages(module)


def communicate(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Stand for a hook."""


def with_hook(register, *arguments):
    module = wrapped()
    getattr(module, register)(None, *arguments)
    return module


def with_delayed_reduction():
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    delayed = [("0.weight", layer[0].weight)]
    return DistributedDataParallel(
        layer, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=layer[1].weight
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (wrapped, []),
        (lambda: wrapped(static_graph=True), ["static_graph=True"]),
        (lambda: with_hook("register_comm_hook", communicate), ["a communication hook"]),
        (lambda: with_hook("_register_buffer_comm_hook", communicate), ["a communication hook for buffers"]),
        (with_delayed_reduction, ["delay_all_reduce_named_params"]),
    ],
)
def test_special_options_of_ddp_are_known(world, make, expected):
    assert undocumented_modules.special_options(make()) == expected


def test_dtensors_within_ddp_are_known(world):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replica", "tensor"))
    spread = parallelize_module(nn.Sequential(nn.Linear(2, 2)), mesh["tensor"], {"0": ColwiseParallel()})
    modules = DistributedDataParallel(spread, device_mesh=mesh["replica"]), wrapped()

    assert [undocumented_modules.has_dtensors(module) for module in modules] == [True, False]


WRAPPERS = [is_sharded, is_replicated, is_first_fsdp]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (nn.Identity, None),
        (wrapped, None),
        (lambda: fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,))), is_sharded),
        (lambda: replicate(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,))), is_sharded),
        (lambda: replicate_by_ddp(nn.Linear(2, 2)), is_replicated),
        (lambda: FullyShardedDataParallel(nn.Linear(2, 2), device_id="cpu"), is_first_fsdp),
    ],
)
def test_what_wraps_a_module_is_known(world, make, expected):
    module = make()

    assert [each for each in WRAPPERS if each(module)] == ([] if expected is None else [expected])


# ---- modules of fully_shard


def sharded(inner=nn.Identity, **policy):
    module = nn.Sequential(nn.Linear(2, 2, bias=False), inner())
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(**policy))


def run_backward(module, *, reduces):
    module.set_requires_gradient_sync(reduces)
    module(torch.ones(1, 2)).sum().backward()


def test_the_settings_of_fully_shard_are_read(world):
    module = sharded()
    assert undocumented_modules.gradient_sync(module) == (True, True)

    module.set_requires_all_reduce(False)
    assert undocumented_modules.gradient_sync(module) == (True, False)

    module.set_requires_gradient_sync(False)
    assert undocumented_modules.gradient_sync(module) == (False, False)

    undocumented_modules.set_gradient_sync(module, reduces=True, reduces_copies=False)
    assert undocumented_modules.gradient_sync(module) == (True, False)


@pytest.mark.parametrize("policy", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}], ids=str)
def test_what_fully_shard_adds_up_is_known_until_it_is_reduced(world, policy):
    module = sharded(**policy)
    assert undocumented_modules.unsharded_parameters(module) == []
    run_backward(module, reduces=True)
    first = module[0].weight.grad.full_tensor().clone()

    for _ in range(2):
        run_backward(module, reduces=False)
    [(shard, summed_type)] = undocumented_modules.summed_types(module)
    [whole] = undocumented_modules.unsharded_parameters(module)
    [casted] = undocumented_modules.unreduced_sums(module)

    assert shard is module[0].weight
    total = casted if policy else whole.grad
    assert (casted is None) is not bool(policy)
    assert total.dtype == summed_type == torch.float32
    torch.testing.assert_close(total, 2 * first)
    assert torch.equal(shard.grad.full_tensor(), first)
    module.set_requires_gradient_sync(True)
    undocumented_modules.end_reduction(module)
    assert whole.grad is None
    assert undocumented_modules.unreduced_sums(module) == [None]
    torch.testing.assert_close(module[0].weight.grad.full_tensor(), 3 * first)
    undocumented_modules.end_reduction(module)  # which finds nothing more to reduce
    torch.testing.assert_close(module[0].weight.grad.full_tensor(), 3 * first)


def test_sums_of_a_type_of_their_own_are_dropped(world):
    module = sharded(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run_backward(module, reduces=False)

    undocumented_modules.drop_unreduced_sums(module)

    assert undocumented_modules.unreduced_sums(module) == [None]


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = sharded(reduce_dtype=torch.float64)

    def forward(self, features):
        return features


def test_torch_cannot_leave_unreduced_what_it_has_never_gathered_and_would_cast(world):
    module = sharded(Unused)
    inner = module[1].inner
    assert [undocumented_modules.may_leave_unreduced(each) for each in (module, inner)] == [True, False]

    with pytest.raises(AttributeError, match="_unsharded_param"):  # else this rule may go
        run_backward(module, reduces=False)

    undocumented_modules.forget_iteration(module)
    inner.unshard()
    inner.reshard()
    assert undocumented_modules.may_leave_unreduced(inner)
    run_backward(module, reduces=False)


class Raising(nn.Module):
    is_raising = True

    def forward(self, features):
        if self.is_raising:
            raise RuntimeError("planted")
        return features


def test_a_module_of_fully_shard_begins_anew_behind_a_forward_that_has_failed(world):
    module = sharded(Raising)
    inner = module[0]
    with pytest.raises(RuntimeError, match="planted"):
        module(torch.ones(1, 2))
    assert not hasattr(inner.weight, "placements")  # it is gathered still

    undocumented_modules.forget_iteration(module)

    assert hasattr(inner.weight, "placements")
    module[1].is_raising = False
    run_backward(module, reduces=True)
    assert inner.weight.grad is not None


def test_sums_to_be_reduced_over_copies_stay_behind_a_forward_that_has_failed_until_they_are_dropped(world):
    module = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("copy", "shard")))
    undocumented_modules.set_gradient_sync(module, reduces=True, reduces_copies=False)
    for keeps in (True, False):
        module.weight.grad = None
        module(torch.ones(1, 2)).sum().backward()
        undocumented_modules.forget_iteration(module)
        if not keeps:
            undocumented_modules.drop_unreduced_sums(module)
        undocumented_modules.set_gradient_sync(module, reduces=True, reduces_copies=True)
        module(torch.ones(1, 2)).sum().backward()
        assert torch.equal(module.weight.grad.full_tensor(), torch.full((2, 2), 1.0 + keeps))
        undocumented_modules.set_gradient_sync(module, reduces=True, reduces_copies=False)


# ---- parameters that take turns


class Table(nn.Linear):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        self.__dict__.setdefault("seen", []).append(name)


def test_a_parameter_is_put_where_setattr_puts_it_and_setattr_is_called_where_a_class_has_its_own():
    plain, own = nn.Linear(2, 2), Table(2, 2)
    own.seen.clear()
    for module in (plain, own):
        other = nn.Parameter(torch.zeros(2, 2))
        put_parameter(module, "weight", other)
        assert module.weight is other
        assert dict(module.named_parameters())["weight"] is other
    assert own.seen == ["weight"]
