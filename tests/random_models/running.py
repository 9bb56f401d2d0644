"""Run a case: some steps with a pipeline and the same in plain torch, and say what is not equal."""

import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

import penstock as ps
from penstock.errors import PenstockError
from penstock.execute.batch.microbatch import BatchSpec, Replicate
from penstock.execute.transport import LocalTransport
from penstock.execute.transport.links import LinkClosed, MessageLate
from tests.random_models import one_process
from tests.random_models.cases import OPTIMIZERS, SPARSE_OPTIMIZERS, draw_case
from tests.random_models.comparison import ACCUMULATED, Trace, differences
from tests.random_models.losses import OBJECTIVES
from tests.random_models.models import make_batch, make_listed, make_plain
from tests.random_models.verdict import Verdict
from tests.support.invariants import Invariants
from tests.support.ranks import RankPool

TRAINED = 3
DEADLINE_S = 30.0
NOT_TO_BLAME = ("PeerLost", "DeadlineExceeded", "PipelineError")


def dense(tensor):
    if tensor is None:
        return None
    return (tensor.coalesce().to_dense() if tensor.is_sparse else tensor).detach().clone()


def optimizers_of(case, named_parameters, prefix):
    """The optimizers of these parameters: one for those with sparse gradients, one for the others."""
    parameters = {True: [], False: []}
    for name, parameter in named_parameters:
        parameters[case.entries[0].kind == "sparse_embedding" and name.startswith(prefix)].append(parameter)
    made = []
    if parameters[False]:
        made.append(OPTIMIZERS[case.optimizer](parameters[False]))
    if parameters[True]:
        made.append(SPARSE_OPTIMIZERS[case.sparse_optimizer](parameters[True]))
    return made


# ---- one process


def run_plain(case):
    model = make_plain(case)
    layers = [model.built[place] for place in range(len(case.entries))]
    plain = one_process.PlainModel(layers, case.takes)
    objective = replace(OBJECTIVES[case.loss], scale=case.scale)
    trace = Trace()
    unique = {id(parameter): (name, parameter) for name, parameter in reversed(model.named_parameters().items())}
    optimizers = optimizers_of(case, unique.values(), f"{model.name(0)}.")
    for step in range(ACCUMULATED + TRAINED):
        loss, losses = one_process.accumulate(plain, make_batch(case, step).microbatches, objective)
        trace.losses.append((loss, losses))
        trace.gradients.append({name: dense(p.grad) for name, p in model.named_parameters().items()})
        if step >= ACCUMULATED:
            for optimizer in optimizers:
                optimizer.step()
        if step >= ACCUMULATED - 1:
            for _, parameter in unique.values():
                parameter.grad = None
    trace.parameters = {name: dense(parameter) for name, parameter in model.named_parameters().items()}
    trace.same_as = {name: unique[id(parameter)][0] for name, parameter in model.named_parameters().items()}
    trace.buffers = {name: dense(buffer) for name, buffer in model.named_buffers().items()}
    trace.outputs = one_process.outputs(plain, make_batch(case, 99).microbatches)
    return trace


# ---- one rank of a pipeline


def run_rank(transport, case, model):
    options = dict(case.options) | replace(OBJECTIVES[case.loss], scale=case.scale).options
    if "table" in case.keywords:
        options["specs"] = BatchSpec(kwargs={"table": Replicate()})
    make = partial(
        ps.Pipeline,
        model.listed,
        loss=OBJECTIVES[case.loss].given,
        split=case.split,
        tied=model.tied,
        transport=transport,
        allow_ragged=case.cut == "ragged",
        deadline_s=DEADLINE_S,
        observers=[Invariants()],
        **options,
    )
    pipeline = make(schedule=case.schedule)
    if case.offloaded:
        tied_groups = pipeline.program.tied_groups  # as this pipeline found them; to close it would end the transport
        pipeline = make(schedule=ps.lower(case.schedule, tied_groups=tied_groups, offload=case.offloaded))
    try:
        return _train(pipeline, case, model)
    finally:
        pipeline.close()


def _train(pipeline, case, model):
    trace = Trace()
    named = dict(pipeline.named_parameters())
    held = {}
    for name, parameter in named.items():
        held.setdefault(id(parameter), []).append(name)
    trace.repeated = [names for names in held.values() if len(names) > 1]
    trace.stages = [list(layers) for layers in pipeline.layers_of_stage]
    listed = list(named.items())
    if case.lists_by == "parameters" and hasattr(pipeline, "parameters"):
        names = {id(parameter): name for name, parameter in reversed(listed)}
        listed = [(names[id(parameter)], parameter) for parameter in pipeline.parameters()]
    optimizers = optimizers_of(case, listed, f"{model.name(0)}.")
    where = "main_grad" if dict(case.options).get("main_gradients") else "grad"
    for step in range(ACCUMULATED + TRAINED):
        result = _step(pipeline, case, make_batch(case, step))
        trace.losses.append((result.loss, result.losses))
        trace.gradients.append({name: dense(getattr(p, where, None)) for name, p in named.items()})
        if step >= ACCUMULATED:
            _update(optimizers, named, where)
        if step >= ACCUMULATED - 1:
            for parameter in named.values():
                parameter.grad = None
                setattr(parameter, where, None)
    trace.parameters = {name: dense(parameter) for name, parameter in named.items()}
    trace.buffers = {name: dense(buffer) for name, buffer in _own_buffers(pipeline, model).items()}
    batch = make_batch(case, 99)
    trace.outputs = pipeline.evaluate(batch.given, return_outputs=True, **batch.keywords).outputs
    return trace


def _step(pipeline, case, batch):
    if case.passes == "all":
        return pipeline.step(batch.given, target=batch.target, **batch.keywords)
    placement, stages = pipeline.schedule.placement, [stage.index for stage in pipeline.stages]
    is_first = any(placement.previous_stage[stage] < 0 for stage in stages)
    is_last = any(placement.next_stage[stage] < 0 for stage in stages)
    args = (batch.given,) if is_first else ()
    return pipeline.step(*args, target=batch.target if is_last else None, **batch.keywords)


def _update(optimizers, named, where):
    if where == "main_grad":
        for parameter in named.values():
            main = getattr(parameter, where, None)
            parameter.grad = None if main is None else main.to(parameter.dtype)
    for optimizer in optimizers:
        optimizer.step()


def _own_buffers(pipeline, model):
    """The buffers of this rank's layers, by name."""
    return {
        f"{model.name(place)}.{name}": buffer
        for stage in pipeline.stages
        for place, layer in stage.layers.items()
        for name, buffer in layer.named_buffers()
    }


# ---- all ranks


def run_threads(case):
    """Return per rank its trace, or what it raised."""
    num_ranks = case.schedule.num_ranks
    models = [make_listed(case) for _ in range(num_ranks)]  # here, since threads share torch's generator
    transports = LocalTransport.create(num_ranks, DEADLINE_S)
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(partial(_guarded, case), transports, models))


def _guarded(case, transport, model):
    try:
        return run_rank(transport, case, model)
    except Exception as error:
        transport.abort()  # the other ranks must not wait for this one
        return error


def run_on_process(rank, case):
    """Return the trace of this rank, or what it raised; runs in a process of its own."""
    torch.set_num_threads(1)
    try:
        return run_rank(None, case, make_listed(case))
    except Exception as error:
        error.add_note(traceback.format_exc())
        return _picklable(error)


@dataclass
class Failure:
    """What a rank in another process raised."""

    is_refusal: bool
    message: str
    details: str


def _picklable(error):
    return Failure(is_refusal(error), f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


POOLS = {}


def run_processes(case):
    """Return per rank its trace, or what it raised, on processes that are kept for the next case."""
    num_ranks = case.schedule.num_ranks
    pool = POOLS.setdefault(num_ranks, RankPool(num_ranks))
    outcome = pool.attempt(run_on_process, case, timeout_s=100)
    if outcome.has_failed():
        pool.close()
        return [Failure(False, f"ranks failed: {outcome}"[:300], str(outcome))]
    if any(isinstance(found, Failure) for found in outcome.results.values()):
        pool.close()
    return [outcome.results[rank] for rank in range(num_ranks)]


def close_pools():
    for pool in POOLS.values():
        pool.close()


# ---- the verdict


def is_refusal(error):
    """Whether Penstock refuses in words of its own: no error of torch's or of the code's is behind it.

    Behind what a rank says whose messages were given up is the error of its link, which is Penstock's too.
    """
    if not isinstance(error, PenstockError):
        return False
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, (PenstockError, LinkClosed, MessageLate))


@contextmanager
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def judge(seed):
    """Run the case of a seed."""
    return judge_case(draw_case(seed))


def judge_case(case):
    """Run a case and say how it ended."""
    with one_thread():
        try:
            wanted = run_plain(case)
        except Exception as error:
            details = "".join(traceback.format_exception(error))
            return Verdict(case.seed, "impossible", f"{type(error).__name__}: {error}"[:200], details)
        found = (run_processes if case.is_on_processes else run_threads)(case)
    failures = [
        each if isinstance(each, Failure) else _picklable(each) for each in found if not isinstance(each, Trace)
    ]
    if failures:
        # The ranks that did not fail themselves hear only that another one is gone.
        first = min(failures, key=lambda failure: (failure.is_refusal, failure.message.startswith(NOT_TO_BLAME)))
        outcome = "refused" if all(failure.is_refusal for failure in failures) else "wrong"
        return Verdict(case.seed, outcome, first.message[:600], f"{case}\n{first.details}")
    wrong = differences(case, found, wanted)
    return Verdict(case.seed, "wrong" if wrong else "equal", "; ".join(wrong[:4]), f"{case}\n" + "\n".join(wrong))
