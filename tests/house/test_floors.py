"""A file imports only lower floors and its own folder, and planning never loads torch."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.house.source import SOURCE, assert_none, imports, modules, nodes, parse, parts_of_map

# Every room (a folder or file directly in src/penstock), its floor, and the floors that it may import.
ROOMS = {
    "errors": (0, {0}),
    "placement": (0, {0}),
    "tables": (0, {0}),
    "version": (0, {0}),
    "files": (0, {0}),
    "running_time": (0, {0}),
    "garbage": (0, {0}),
    "skipping": (0, {0}),
    "microbatch_place": (0, {0}),
    "ir": (1, {0}),
    "schedules": (2, {0, 1}),
    "proofs": (2, {0, 1}),
    "lowering": (2, {0, 1}),
    "partition": (2, {0}),
    "simulation": (3, {0, 1}),
    "planning": (4, {0, 1, 2, 3}),
    "searching": (5, {0, 1, 2, 3, 4}),
    "show": (5, {0, 1, 3}),
    "models": (6, {0}),
    "execute": (6, {0, 1}),
    "construction_plan": (7, {0, 1, 2, 3, 4, 5, 6}),
    "step_programs": (7, {0, 1, 2, 3, 4, 5, 6}),
    "construction": (7, {0, 1, 2, 3, 4, 5, 6}),
    "pipeline": (7, {0, 1, 2, 3, 4, 5, 6}),
    "losses": (7, {0, 1, 2, 3, 4, 5, 6}),
    "checkpoints": (7, {0, 1, 2, 3, 4, 5, 6}),
    "train": (7, {0, 1, 2, 3, 4, 5, 6}),
    "moving": (7, {0, 1, 2, 3, 4, 5, 6}),
    "verifying": (7, {0, 1, 2, 3, 4, 5, 6}),
    "hugging_face": (7, {0, 1, 2, 3, 4, 5, 6}),
    "sizing": (7, {0, 1, 2, 3, 4, 5, 6}),
    "run_planning": (7, {0, 1, 2, 3, 4, 5, 6}),
    "cli": (8, {0, 1, 2, 3, 4, 5, 6, 7}),
    "__main__": (9, {0, 8}),
    "__init__": (9, {0, 1, 2, 3, 4, 5, 6, 7}),
}
# The few pairs (from, to) that a floor number does not describe, and why.
DOORS = {
    ("pipeline", "construction"),  # it is made there
    ("pipeline", "construction_plan"),  # from what it was called with
    ("construction", "construction_plan"),  # which it begins with
    ("construction", "step_programs"),  # it makes them
    ("step_programs", "construction_plan"),  # by which they are planned
    ("checkpoints", "pipeline"),  # of which they are made
    ("train", "checkpoints"),  # the training loop saves and loads them
    ("train", "pipeline"),  # the training loop holds a Pipeline
    ("hugging_face", "pipeline"),  # it saves what one holds
    ("hugging_face", "checkpoints"),  # by their files
    ("train", "hugging_face"),  # a run file may name a model
    ("moving", "pipeline"),  # so do the adapters
    ("verifying", "pipeline"),  # it runs the parts of a model
    ("train", "verifying"),  # before the first step of a run
    ("run_planning", "hugging_face"),  # whose models it plans for
    ("run_planning", "train"),  # a plan is a run file
    ("run_planning", "sizing"),  # it counts what layers do
    ("moving", "train"),  # gradients are clipped by their norm over all ranks in one place
    ("sizing", "hugging_face"),  # a model may be a folder of transformers
    ("sizing", "train"),  # layers are checkpointed, and run by themselves, as a run does it
    ("cli", "__init__"),  # `penstock --version`
}
LAST_PLANNING_FLOOR = 5
NOT_ON_PLANNING_FLOORS = {
    *("torch", "pydantic", "safetensors", "rich", "tensorboard", "tokenizers", "matplotlib", "transformers"),
}
OPTIONAL = {
    "matplotlib",
    "tensorboard",
    "tokenizers",
    "wandb",
    "ortools",
    "argcomplete",
    "datasets",
    "transformers",
    "peft",
} | {
    "jinja2"  # by which transformers reads chat templates
}
# The few late imports of packages that are always there: (file, package), and why.
LATE = {
    ("penstock.ir.hot", "numba"),  # the compiler takes longer to load than a small plan takes to make
    ("penstock.tables", "rich"),  # planning starts without it, and most of it prints no table
    ("penstock.schedules.registry", "importlib"),  # its metadata takes as long to load as a tenth of all else
}
# The files that may use what torch's documentation does not promise, and names of such things.
UNDOCUMENTED = (
    *(
        f"penstock.execute.undocumented{part}"
        for part in ("", "_backends", "_compiler", "_kernels", "_modules", "_trees")
    ),
    "penstock.models.cutting.undocumented",
    "penstock.sizing.undocumented",
)
OF_TORCH = {
    *("_version", "_base", "_is_view", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks"),
    *("AccumulateGrad", "unpack_hook", "get_group_store", "ProcessGroupGloo", "ProcessGroupNCCL"),
    *("_st_info", "_comm_hooks", "_delay_all_reduce_params", "require_backward_grad_sync", "parameters_to_ignore"),
    *("set_requires_gradient_sync", "_boxed_call", "_forward_cls", "_orig_mod", "_parameters", "_modules"),
}
SAVED_BY_NODES = ("_saved_", "_raw_saved_")
NAMES = {module.name for module in modules()}


def own_target(target):
    """Return the module of ours that `target` names, or None: penstock.ir.action.Kind -> penstock.ir.action."""
    while target and target not in NAMES:
        target = target.rpartition(".")[0]
    return target or None


def room_of(name):
    return name.split(".")[1] if "." in name else "__init__"


def wrong_floors(module):
    floor, reach = ROOMS[module.room]
    found = []
    for item in imports(module):
        target = own_target(item.target)
        if target is None or room_of(target) == module.room or (module.room, room_of(target)) in DOORS:
            continue
        if ROOMS[room_of(target)][0] not in reach:
            found.append(f"{module.at(item.node)}: {module.room} (floor {floor}) imports {target}; it may use {reach}")
    return found


def wrong_packages(module):
    if ROOMS[module.room][0] > LAST_PLANNING_FLOOR:
        return []
    allowed_late = {"show": {"matplotlib"}, "tables": {"rich"}}.get(module.room, set())
    return [
        f"{module.at(item.node)}: floors 0-{LAST_PLANNING_FLOOR} do without {item.target}"
        for item in imports(module)
        if item.target.split(".")[0] in NOT_ON_PLANNING_FLOORS - (allowed_late if item.is_inside_function else set())
    ]


def late_imports(module):
    if module.room == "cli":
        return []
    return [
        f"{module.at(item.node)}: imports {item.target} inside a function; move it to the top of the file"
        for item in imports(module)
        # torch's writer for TensorBoard is how that optional package is used
        if item.is_inside_function and not OPTIONAL & set(item.target.split("."))
        if (module.name, item.target.split(".")[0]) not in LATE
    ]


def is_private(part):
    return part.startswith("_") and not (part.startswith("__") and part.endswith("__"))


def private_imports(module):
    folder = module.name if module.is_package else module.name.rpartition(".")[0]
    found = []
    for item in imports(module):
        parts = item.target.split(".")
        # files directly in src/penstock are rooms of their own
        is_own_folder = folder != "penstock" and item.target.startswith(folder + ".")
        if parts[0] not in sys.stdlib_module_names and not is_own_folder and any(map(is_private, parts)):
            found.append(f"{module.at(item.node)}: {item.target} is private to its owner")
    return found


def private_attributes(module):
    """Find `torch._C` and the like: a private attribute of an imported module that is not Python's own."""
    names = {alias.asname or alias.name.split(".")[0] for node in nodes(module, ast.Import) for alias in node.names}
    names -= sys.stdlib_module_names
    return [
        f"{module.at(node)}: {ast.unparse(node)} is private to its owner"
        for node in nodes(module, ast.Attribute)
        if is_private(node.attr) and ast.unparse(node).split(".")[0] in names
    ]


def undocumented_torch(module):
    """Find private and undocumented names of torch: as attributes, and as texts, by which `getattr` gets at them."""
    docs = {id(node.value) for node in nodes(module, ast.Expr)}
    found = []
    for node in nodes(module, ast.Attribute, ast.Constant):
        name, owner = "", ""
        if isinstance(node, ast.Attribute):
            name, owner = node.attr, ast.unparse(node.value)
        elif isinstance(node.value, str) and id(node) not in docs:
            name = node.value
        is_of_node = name.startswith(SAVED_BY_NODES) or name.endswith("Backward0")
        if owner not in ("self", "cls") and (is_of_node or name in OF_TORCH or f"{owner}.{name}" == "torch.ops"):
            found.append(f"{module.at(node)}: {name} is no documented part of torch; use it in {UNDOCUMENTED[0]}")
    return [] if module.name in UNDOCUMENTED else found


def loaded_by(statement):
    """Return the top-level packages that a fresh interpreter holds after `statement`."""
    script = f"import sys\n{statement}\nprint(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    environment = {"PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_room_has_a_floor():
    assert_none([f"{module.name}: add {module.room} to ROOMS" for module in modules() if module.room not in ROOMS])


def test_imports_have_no_cycle():
    graph = {
        module.name: {own_target(item.target) for item in imports(module)} - {None, module.name}
        for module in modules()
        if module.name != "penstock"
    }

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def parts_of(package):
    """Return, per folder or file directly in a package, those that it imports."""
    graph = {}
    for module in modules():
        part = part_in(package, module.name)
        if part is not None:
            targets = {part_in(package, own_target(item.target)) for item in imports(module)} - {None, part}
            graph.setdefault(part, set()).update(targets)
    return graph


def part_in(package, name):
    prefix = f"penstock.{package}."
    return name.removeprefix(prefix).split(".")[0] if name and name.startswith(prefix) else None


def wrong_order(order, graph):
    """List the parts that `order`, from below to above, lacks or has besides, and the imports against it."""
    found = [f"{part} is not in the map" for part in graph if order.count(part) != 1]
    found += [f"{part} of the map is not there" for part in order if part not in graph]
    places = {part: place for place, part in enumerate(order)}
    return found + [
        f"{part} imports {target}, which the map has above it"
        for part, targets in graph.items()
        for target in targets
        if places.get(target, -1) > places.get(part, len(order))
    ]


def test_the_folders_of_train_stand_one_on_the_other():
    try:
        TopologicalSorter(parts_of("train")).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_parts_of_execute_stand_in_the_order_of_its_map():
    assert_none(wrong_order(parts_of_map(), parts_of("execute")))


@pytest.mark.parametrize(
    ("order", "num_wrong"), [("abc", 0), ("acb", 1), ("cba", 2), ("ab", 1), ("abcd", 1), ("abbc", 1)]
)
def test_a_wrong_order_of_parts_is_found(order, num_wrong):
    assert len(wrong_order(list(order), {"a": set(), "b": {"a"}, "c": {"b"}})) == num_wrong


@pytest.mark.parametrize(
    "measure", [wrong_floors, wrong_packages, late_imports, private_imports, private_attributes, undocumented_torch]
)
def test_no_file_imports_or_uses_what_its_place_forbids(measure):
    assert_none([line for module in modules() for line in measure(module)])


def test_no_import_is_hidden_from_running_code():
    assert_none([f"{module.name}: TYPE_CHECKING" for module in modules() if "TYPE_CHECKING" in module.text])


def test_importing_loads_neither_torch_nor_a_compiler_nor_plotting():
    loaded = loaded_by("import penstock, penstock.cli")

    assert "penstock" in loaded
    assert not loaded & {"torch", "numba", "matplotlib", "tensorboard"}


@pytest.mark.parametrize(
    ("measure", "name", "line", "is_wrong"),
    [
        (wrong_packages, "penstock.errors", "import torch.nn", True),
        (wrong_packages, "penstock.ir.walk", "def f():\n    from torch import nn", True),
        (wrong_packages, "penstock.show.chart", "import matplotlib.pyplot", True),
        (wrong_packages, "penstock.show.chart", "def draw():\n    import matplotlib.pyplot", False),
        (wrong_floors, "penstock.placement", "from penstock import __version__", True),
        (wrong_floors, "penstock.placement", "from penstock.ir.action import Kind", True),
        (wrong_floors, "penstock.lowering.example", "from penstock.schedules.gpipe import GPIPE", True),
        (
            wrong_floors,
            "penstock.ir.walk",
            "import numpy\nfrom .action import Kind\nfrom ..errors import nearest",
            False,
        ),
        (late_imports, "penstock.ir.walk", "def f():\n    import json", True),
        (late_imports, "penstock.ir.walk", "def f():\n    import numba", True),
        (late_imports, "penstock.train.a", "def f():\n    from torch.utils.tensorboard import SummaryWriter", False),
        (private_imports, "penstock.placement", "from penstock.ir.walk import _ready", True),
        (private_imports, "penstock.execute.a", "from torch.utils import _pytree", True),
        (private_imports, "penstock.ir.walk", "from penstock.ir.deps import _rule", False),
        (private_attributes, "penstock.execute.a", "import torch\ntorch._C._cuda()", True),
        (private_attributes, "penstock.ir.walk", "import os\nos._exit(1)", False),
        (undocumented_torch, "penstock.execute.a", "tensor._version", True),
        (undocumented_torch, "penstock.execute.a", "node._saved_self", True),
        (undocumented_torch, "penstock.execute.a", "getattr(node, f'_raw_saved_{name}')", True),
        (undocumented_torch, "penstock.execute.a", "name == 'MmBackward0'", True),
        (undocumented_torch, "penstock.execute.a", "name != '_orig_mod'", True),
        (undocumented_torch, "penstock.execute.a", "torch.ops.aten.mm(a, b)", True),
        (undocumented_torch, "penstock.execute.a", "self._version = tensor.grad_fn", False),
        (undocumented_torch, "penstock.execute.undocumented", "tensor._version", False),
        (undocumented_torch, "penstock.execute.undocumented_compiler", "torch.ops.aten.mm(a, b)", False),
    ],
)
def test_what_is_forbidden_is_found_and_nothing_else(measure, name, line, is_wrong):
    assert bool(measure(parse(line, name))) == is_wrong


def test_an_import_by_a_relative_path_is_made_absolute():
    assert [item.target for item in imports(parse("from ..errors import nearest", "penstock.ir.example"))] == [
        "penstock.errors.nearest"
    ]
