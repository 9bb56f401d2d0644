"""No rank skips a collective by a condition of its own: each one under a condition is listed, with who may skip it."""

import ast
from dataclasses import dataclass

import pytest

from tests.house.source import modules, parse

OF_CONTROL = {"all_gather_object", "together", "on_rank_0", "across"}
OWNER = "penstock.execute.control.collectives"
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
BRANCHES = (ast.If, ast.IfExp, ast.While, ast.For, ast.match_case, ast.ExceptHandler, ast.BoolOp, *COMPREHENSIONS)
STATEMENTS = (ast.stmt, ast.match_case, ast.ExceptHandler)
EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
SCOPES = (ast.FunctionDef, ast.Lambda, ast.ClassDef)


_OF_RUN = "the configuration of the run, which all ranks read alike"
_TOLD = "all ranks go by what one gather told them"
_REPLICAS = "the number of replicas, or whether they share out parameters, is the same on all ranks"
CONDITIONAL = {
    "checkpoints.pretrained load_weights: require_rebuilt": "what rank 0 sees of the folder is told to all",
    "checkpoints.pretrained load_weights: require_settings": "what rank 0 sees of the folder is told to all",
    "checkpoints.pretrained load_weights: find_newest": "what rank 0 sees of the folder is told to all",
    "checkpoints.verification find_newest: _first_problem": "a loop over what rank 0 sees, which is told to all",
    "checkpoints.weight_files save_weights: run_together": "a loop over the same two parts",
    "checkpoints.weight_files save_weights: stage": _TOLD,
    "checkpoints.writer CheckpointWriter.finish: _advance": "all ranks have a save in flight, or none",
    "checkpoints.writer CheckpointWriter.finish: wait_together": "all ranks have a save in flight, or none",
    "checkpoints.writer CheckpointWriter.poll: _advance": "all ranks have a save in flight, or none",
    "checkpoints.writer CheckpointWriter.save: finish": "an option that all ranks pass alike",
    "cli.generate run_command: sample": "one rank alone; the obstacle is the same on all",
    "cli.profile run_command: _profile": "an entry point of every rank",
    "hugging_face.generation _CachedReader.read: _require_filled": "all ranks have read as much",
    "hugging_face.generation generate: all_gather_object": _TOLD,
    "hugging_face.generation next_tokens: shared_tokens": "a loop over a number on which all ranks have agreed",
    "execute.batch.admission Admission._agree: refuse_across": "all ranks of a replica are refused alike",
    "execute.batch.admission Admission._agree_across: agree_across": _REPLICAS,
    "execute.batch.values refuse_other_values: all_gather_object": _TOLD,
    "execute.control.long_work wait_together: all_gather_object": "a loop that all ranks end in one gather",
    "execute.control.long_work work_together: together": "`wait_together` gives all ranks the same answer",
    "execute.losses.exchange LossExchange._of_job: across": _REPLICAS,
    "execute.model_part ModelPart.clip_grad_norm_: across": _REPLICAS,
    "execute.model_part ModelPart.load_state_dict: deal_out": _REPLICAS,
    "execute.model_part ModelPart.load_state_dict: scatter_state": "`from_rank` was agreed on",
    "execute.model_part ModelPart.norms: _agree": "with `local` the call is of one rank alone",
    "execute.model_part ModelPart.state_dict: _agree": "without `on_rank` the call is of one rank alone",
    "execute.model_part ModelPart.state_dict: entries_of_ranks": "the ranks of other replicas send rows instead",
    "execute.model_part ModelPart.state_dict: require_equal_copies": "without `on_rank` the call is of one rank alone",
    "execute.observing.clock ClockComparison.begin: all_gather_object": "the hosts of all ranks are known to all",
    "execute.observing.copies CopyChecks.end: log_norms": "a step fails on all ranks; the mode was agreed on",
    "execute.observing.copies compare_copies: together": _TOLD,
    "execute.observing.log log_norms: across": _REPLICAS,
    "execute.observing.log norms_by_name: across": _REPLICAS,
    "execute.observing.log norms_by_name: all_gather_object": "with `local` the call is of one rank alone",
    "execute.observing.memory_report gather_memory: gather_sizes": _TOLD,
    "execute.observing.recorder StepRecording.end: all_gather_object": "a step fails on all ranks",
    "execute.rank_parameters RankParameters.agree_on_tied: all_gather_object": "what is trained was agreed on",
    "moving.deepspeed Engine._pipeline: _make_pipeline": "all ranks ask for the same number of microbatches",
    "moving.megatron ForwardBackward._pipeline_for: _make_pipeline": "all ranks pass the models of one call",
    "train.generation _tokens: _tokens_with_cache": "the stages of all ranks are of one model",
    "train.generation _tokens: _tokens_without_cache": "a cache is refused on all ranks alike",
    "train.generation _tokens_without_cache: shared_tokens": "a loop over a number of the run's configuration",
    "train.generation obstacle_to_sampling: all_gather_object": _OF_RUN,
    "train.generation sample: generate": "the obstacle is the same on all ranks",
    "train.document_leaks require_separate_documents: together": _OF_RUN,
    "train.loop train: claimed_together": "an argument of the entry point of every rank",
    "train.loop train: _write_sample": _OF_RUN,
    "train.measuring.exchanges _exchange: _seconds": "a loop over the stages of a unit, alike in all replicas",
    "train.measuring.exchanges _measure_link: _seconds": "a loop over the same rounds",
    "train.measuring.exchanges _measure_unit: _exchange": "a loop over the same rounds",
    "train.measuring.exchanges measure_channels: all_gather_object": "a loop over channels that all ranks list alike",
    "train.measuring.exchanges measure_exchanges: _measure_link": "the ranks at one place of all replicas",
    "train.measuring.exchanges measure_exchanges: _measure_unit": "the ranks at one place of all replicas",
    "train.measuring.exchanges measure_exchanges: all_gather_object": _REPLICAS,
    "train.measuring.measure measure_layers: on_rank_0": "layers and rounds, which all ranks pass alike",
    "train.measuring.split choose_split: on_rank_0": "rank 0 has told whether times were kept",
    "train.measuring.split choose_split: times_of_layers": _OF_RUN,
    "train.measuring.split times_of_layers: measure_layers": "rank 0 has told whether times were kept",
    "train.resuming RunCheckpoints.__init__: on_rank_0": _OF_RUN,
    "train.resuming RunCheckpoints._resume_data: working_together": _OF_RUN,
    "train.resuming RunCheckpoints._save: _source_state": "all ranks have saved the same step",
    "train.resuming RunCheckpoints._source_state: all_gather_object": _OF_RUN,
    "train.resuming RunCheckpoints._unless_moved: _leave_moved": _TOLD,
    "train.resuming RunCheckpoints._unless_moved: all_gather_object": "a save fails on all ranks",
    "train.resuming RunCheckpoints.after_step: _leave_moved": _TOLD,
    "train.resuming RunCheckpoints.after_step: _save": _TOLD,
    "train.resuming RunCheckpoints.after_step: _unless_moved": _TOLD,
    "train.resuming RunCheckpoints.resume: _resume_data": "rank 0 has told whether there is a checkpoint",
    "train.resuming RunCheckpoints.resume: load_newest": "rank 0 has told whether there is a checkpoint",
    "train.resuming RunCheckpoints.resume: on_rank_0": "rank 0 has told whether there is a checkpoint",
    "train.resuming begin_with_weights: _has_checkpoints": _OF_RUN,
    "train.resuming begin_with_weights: load_weights": "rank 0 has told whether there is a checkpoint",
    "train.run_evaluation evaluate_run: on_rank_0": "an argument of the entry point of every rank",
    "train.setup prepare_together: working_together": "a loop over two turns, in each of which all ranks take part",
    "train.step Trainer.step: _gather": _OF_RUN,
    "train.step Trainer.step: across": _OF_RUN,
    "train.step_runner StepRunner._peak_bytes: all_gather_object": _OF_RUN,
    "train.step_runner StepRunner.continue_recording: all_gather_object": _OF_RUN,
    "train.together working_together: work_together": "the number of ranks",
}
"""Uses of a collective under a condition: why no rank skips it alone."""


@dataclass(frozen=True)
class Use:
    """A name or attribute that a function uses."""

    name: str
    receiver: str
    """`self`, `control` where it is a collective of Control, or empty for a plain name."""
    is_conditional: bool


@dataclass(frozen=True)
class Function:
    """A function or method of src."""

    module: str
    scopes: tuple
    """The names of what it is within, and its own."""
    uses: list

    @property
    def place(self):
        return f"{self.module.removeprefix('penstock.')} {'.'.join(self.scopes)}"


def is_control(node):
    """Whether an attribute is one of `Control`; that of places which is called `across` says where ranks are."""
    return node.attr != "across" or ast.unparse(node.value).endswith("control")


def uses(node, is_conditional):
    """Yield what a node uses, and whether a condition within it decides on that."""
    if isinstance(node, SCOPES) and not isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Name):
        yield Use(node.id, "", is_conditional)
    elif isinstance(node, ast.Attribute) and node.attr in OF_CONTROL and is_control(node):
        yield Use(node.attr, "control", is_conditional)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        yield Use(node.attr, "self", is_conditional)
    first = unconditional_part(node)
    if first is not None:
        yield from uses(first, is_conditional)
    children = [each for each in parts_of(node) if each is not first]
    yield from in_order(children, is_conditional or isinstance(node, BRANCHES))


def unconditional_part(node):
    """Return the part of a branch that is evaluated in any case, such as its test; None where there is none."""
    match node:
        case ast.BoolOp():
            return node.values[0]
        case ast.IfExp() | ast.If() | ast.While():
            return node.test
        case ast.For():
            return node.iter
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            return node.generators[0].iter
    return None


def parts_of(node):
    """List the children of a node; of a comprehension also those of its loops."""
    for child in ast.iter_child_nodes(node):
        yield from ast.iter_child_nodes(child) if isinstance(child, ast.comprehension) else [child]


def in_order(nodes, is_conditional):
    """Yield the same of nodes one after another: what stands behind a conditional return is under its condition."""
    for node in nodes:
        yield from uses(node, is_conditional)
        is_conditional |= leaves(node)


def leaves(node):
    """Whether a node may leave the block that it is in, by a condition."""
    if isinstance(node, SCOPES):
        return False
    inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, STATEMENTS)]
    return any(isinstance(each, EXITS) or leaves(each) for each in inner)


def functions_of(module):
    """List the functions and methods of a module, nested ones too."""

    def walk(node, scopes):
        for child in ast.iter_child_nodes(node):
            is_scope = isinstance(child, ast.FunctionDef | ast.ClassDef)
            within = (*scopes, child.name) if is_scope else scopes
            if isinstance(child, ast.FunctionDef):
                yield Function(module.name, within, list(in_order(child.body, False)))
            yield from walk(child, within)

    return list(walk(module.tree, ()))


class Calls:
    """The functions of src, and which one a name in one of them means.

    Methods of other objects are not followed: what they do under a condition is listed where they are.
    """

    def __init__(self, sources):
        self.functions = [each for module in sources if module.name != OWNER for each in functions_of(module)]
        self._known = {(each.module, each.scopes) for each in self.functions}
        self._imported = {
            (module.name, alias.asname or alias.name): (node.module, (alias.name,))
            for module in sources
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def meant(self, function, use):
        """Return the function that is used, `control` for a collective of Control, None for anything else."""
        module, scopes = function.module, function.scopes
        if use.receiver == "control":
            return "control"
        if use.receiver == "self":
            candidates = [(module, (scopes[0], use.name))]
        else:
            # A plain name within a class is none of its methods.
            outer = [scopes[:depth] for depth in range(len(scopes), 0, -1) if (module, scopes[:depth]) in self._known]
            candidates = [(module, (*names, use.name)) for names in (*outer, ())]
            candidates.append(self._imported.get((module, use.name)))
        return next((key for key in candidates if key in self._known), None)

    def conditional_collectives(self):
        """Return the uses under a condition of what is a collective, or leads to one."""
        meant = [(f, use, key) for f in self.functions for use in f.uses if (key := self.meant(f, use))]
        collectives, size = {"control"}, 0
        while len(collectives) > size:
            size = len(collectives)
            collectives |= {(f.module, f.scopes) for f, _, key in meant if key in collectives}
        return {f"{f.place}: {use.name}" for f, use, key in meant if use.is_conditional and key in collectives}


def test_every_collective_under_a_condition_is_listed_with_who_may_skip_it():
    found = Calls(modules()).conditional_collectives()

    assert found - CONDITIONAL.keys() == set(), "let every rank make it, or say below why all ranks skip it alike"
    assert CONDITIONAL.keys() - found == set(), "it stands under no condition any more"


@pytest.mark.parametrize(
    ("body", "is_conditional"),
    [
        ("    if a:\n        control.together(b)", True),
        ("    if a:\n        return\n    control.together(b)", True),
        ("    if a:\n        raise b\n    control.together(b)", True),
        ("    a and control.together(b)", True),
        ("    return control.together(b) if a else c", True),
        ("    for a in b:\n        control.together(a)", True),
        ("    while a:\n        control.together(a)", True),
        ("    try:\n        a()\n    except b:\n        control.together(b)", True),
        ("    [control.across(each) for each in a]", True),
        ("    if a:\n        share(b)", True),
        ("    if a:\n        clip(control.all_gather_object)", True),
        ("    control.together(b)", False),
        ("    return [each for each in control.across(b) if each]", False),
        ("    if control.across(a):\n        return", False),
        ("    def make():\n        if a:\n            raise b\n    control.together(make)", False),
        ("    if a:\n        places.across", False),
    ],
)
def test_a_condition_is_found_where_there_is_one(body, is_conditional):
    share = "def share(control):\n    control.together(b)\n"
    module = parse(f"{share}def f(control, a):\n{body}\n", "penstock.example")

    places = [place.partition(":")[0] for place in Calls([module]).conditional_collectives()]
    assert places == ["example f"] * is_conditional
