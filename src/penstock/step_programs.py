"""`StepPrograms`: the program of each kind of step and number of microbatches of a pipeline, made when it is asked for.

    the schedule's own number            the program that the pipeline was made with
    another number, small family         the family's schedule for it, planned at once
    another number, large family         rounds of the first program, until the family's has been planned in a thread
    another number, schedule as a whole  rounds of the first program
    evaluation                           the forwards alone, in rounds

`ir/rounds.py` says what rounds are. Every program is proved before it runs.

Guarantees: a step waits for no planning that takes long; all ranks of all replicas run the same program, as each says
in its proposal what it has planned, and one that is not there on all of them runs nowhere. Relies on: nothing changes
the plan of a rank, which the thread reads.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.construction_plan import Plan
from penstock.errors import PenstockError, ScheduleError, warn
from penstock.execute.control.agreement import Mode
from penstock.execute.losses.grad_scaler import grad_scaler_of
from penstock.execute.rank_parameters import Units
from penstock.execute.session import MOST_PROGRAMS, ProgramKey
from penstock.ir.program import Program
from penstock.ir.rounds import in_rounds
from penstock.ir.schedule import Schedule
from penstock.ir.split_backwards import with_split_backwards
from penstock.planning import RecentTables, memory_demand, prove_and_lower_once
from penstock.proofs import Demand, prove

ROWS_PLANNED_AT_ONCE = 1_500
"""Rows of a program that is planned within a step: this takes about 10 ms (bench/microbatches.py)."""
_ANY_ROWS = 10**9


class StepPrograms:
    """The programs of a pipeline; one of them is made and proved when it is first asked for."""

    def __init__(self, plan: Plan, tied_groups: Sequence[Sequence[int]], units: Units) -> None:
        """Plan what training runs with the schedule's own number of microbatches."""
        self._plan = plan
        self._tied_groups = tied_groups
        self._sharding = replace(plan.sharding, units=units)
        self.training = self._lowered(plan.orders)
        self._recent: RecentTables[Program] = RecentTables(MOST_PROGRAMS, _ANY_ROWS)
        self._beside = PlanningBeside(lambda number: self._lowered(self._require_schedule(number)))

    def of(self, key: ProgramKey, *, is_planned: bool = False) -> Program:
        """Return the program of a kind of step; `is_planned` says that all ranks run the one of `planned`.

        Raises:
            ScheduleError, ConfigError: there is no such schedule, or no memory for it.
        """
        if is_planned:
            return self._beside.get(key.num_microbatches)
        parts = (key.mode, key.num_microbatches, key.most_microbatches)
        return self._recent.once(parts, lambda: self._made(key))

    def planned(self) -> tuple[int, ...]:
        """Return the numbers of microbatches whose programs of training have been planned beside the steps."""
        return self._beside.numbers()

    def _made(self, key: ProgramKey) -> Program:
        match key.mode:
            case Mode.TRAIN:
                return self._training(key.num_microbatches)
            case Mode.TRAIN_SPLIT:
                return self._split(key.num_microbatches)
        # An evaluation may have any number of microbatches, also one for which the family has no schedule.
        most = key.most_microbatches
        if self.training.is_forward_only and most == self.training.num_microbatches:
            program = self.training
        else:
            program = self._lowered(in_rounds(self._plan.schedule.forward_only(), most))
        # A replica with fewer microbatches gathers sharded weights as often as the one with the most microbatches,
        # since a gather is a collective of all replicas.
        return program if key.num_microbatches == most else program.first_microbatches(key.num_microbatches)

    def _training(self, number: int) -> Program:
        """Return what training runs with this number of microbatches, as long as nothing better has been planned."""
        if number == self.training.num_microbatches:
            return self.training
        is_sharded = self._plan.options.is_sharded
        schedule = self._plan.schedule_of(number)
        if schedule is None:
            return self._lowered(in_rounds(self._plan.schedule, number)) if is_sharded else self._rounds(number)
        # All ranks decide alike, by what all of them know. Rounds of a program that gathers weights are lowered, too,
        # so they would be there no sooner than the family's own.
        num_rows = self.training.num_rows * number // self.training.num_microbatches
        if not is_sharded and num_rows > ROWS_PLANNED_AT_ONCE:
            self._beside.ask(number)
            return self._rounds(number)
        try:
            return self._lowered(schedule)
        except ScheduleError:
            # It takes more memory than `memory_limit` allows, as GPipe's does that grows with the number. Rounds take
            # what one of them takes.
            return self._lowered(in_rounds(self._plan.schedule, number))

    def _split(self, number: int) -> Program:
        """Return what training runs with every backward in two parts."""
        schedule = self._plan.schedule_of(number)
        if schedule is not None:
            try:
                return self._lowered(with_split_backwards(schedule))
            except ScheduleError:  # as in `_training`
                pass
        return self._lowered(with_split_backwards(in_rounds(self._plan.schedule, number)))

    def _require_schedule(self, number: int) -> Schedule:
        schedule = self._plan.schedule_of(number)
        assert schedule is not None, "rounds are not planned beside the steps"
        return schedule

    def _rounds(self, number: int) -> Program:
        """Return the first program in rounds; nothing of it is planned again."""
        program = in_rounds(self.training, number)
        prove(program, self._demand(program), transport=self._plan.options.transport_model.name)
        return program

    def _lowered(self, schedule: Schedule | Program) -> Program:
        options = self._plan.options
        has_scaler = grad_scaler_of(options.scale_loss) is not None  # its ranks agree where optimizers step
        return prove_and_lower_once(
            schedule,
            self._demand(schedule),
            tied_groups=self._tied_groups,
            optimizer_step=has_scaler or options.optimizer_step is not None,
            sharding=self._sharding,
            messages=options.transport_model.name,
            offload=() if schedule.is_forward_only else options.offload,
        )

    def _demand(self, table: Schedule | Program) -> Demand:
        options = self._plan.options
        return memory_demand(options.memory_limit, options.costs, table, self._plan.layers_of_stage)


class PlanningBeside:
    """Plans programs in a thread, one after another, while steps run.

    A program that cannot be planned, because there is no memory for it, never comes: its number stays in rounds. What
    `numbers` has told stays there until it is asked again, since ranks agree on a program before they run it.
    """

    def __init__(self, plan: Callable[[int], Program]) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._waiting: deque[int] = deque()
        self._asked: set[int] = set()
        self._programs: dict[int, Program] = {}
        self._is_running = False

    def ask(self, number: int) -> None:
        """Begin to plan a number of microbatches, unless this was asked before."""
        with self._lock:
            if number in self._asked:
                return
            self._asked.add(number)
            self._waiting.append(number)
            if self._is_running:
                return
            self._is_running = True
        # A daemon, since the process must not wait at its end for a program that nobody will run.
        threading.Thread(target=self._run, name="penstock planning", daemon=True).start()

    def numbers(self) -> tuple[int, ...]:
        """Return the numbers whose programs are there, and drop the oldest of too many before."""
        with self._lock:
            for oldest in list(self._programs)[:-MOST_PROGRAMS]:
                del self._programs[oldest]
                self._asked.discard(oldest)
            return tuple(self._programs)

    def get(self, number: int) -> Program:
        """Return a program that is there, which is then the last one to be dropped."""
        with self._lock:
            program = self._programs.pop(number)
            self._programs[number] = program
            return program

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                number = self._waiting.popleft()
            try:
                program = self._plan(number)
            except PenstockError:
                continue
            except Exception as error:  # steps go on in rounds, and other numbers are still planned
                warn(f"planning {number} microbatches beside the steps has failed: {type(error).__name__}: {error}")
                continue
            with self._lock:
                self._programs[number] = program
