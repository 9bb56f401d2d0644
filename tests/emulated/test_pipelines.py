"""Training on the emulated device gives the CPU's losses and weights to the bit, and every access is ordered.

The cells cover all pairs of a family with a feature, of either with `run_ahead` and with the number of ranks.
"""

from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from penstock import Observer
from penstock.execute.accelerator import allocator_bytes
from penstock.ir.operations import IS_BACKWARD
from penstock.pipeline import Pipeline
from tests.emulated.pipelines import FEATURES, WIDTH, Cell, expect_equal_training, transport_of
from tests.emulated.scenarios import POLICIES

pytestmark = pytest.mark.emulated

FAMILIES = ["1f1b", "zb-h1", "interleaved-1f1b", "zbv", "gpipe", "dualpipe-v"]
RUN_AHEAD = [None, 1, 2]
NUM_RANKS = [2, 3, 4]
OF_ALL = ["plain", "dropout", "recompute", "ties", "variable shapes", "main gradients", "late weights"]


def cells():
    """Every family with every feature; the other two axes in turn, so that all pairs meet."""
    pairs = [(family, feature) for family in FAMILIES for feature in OF_ALL]
    pairs += [("seq1f1b", "slices")] * 3 + [("dualpipe-v", "overlapped pairs")] * 3
    found, turns = [], {}
    for family, feature in pairs:
        row, column = FAMILIES.index(family) if family in FAMILIES else 0, list(FEATURES).index(feature)
        turn = turns[family, feature] = turns.get((family, feature), -1) + 1
        ahead = RUN_AHEAD[(row + column + turn) % 3]
        ranks = NUM_RANKS[(row + 2 * column + turn + row // 3) % 3]
        found.append(Cell(family, feature, ranks, ahead))
    return found


class AtFirstBackward(Observer):
    """Notes the bytes that tensors take before the first backward of a step."""

    def __init__(self, device):
        self.device = device
        self.begin_bytes = self.found_bytes = None

    def begin(self, step):
        self.begin_bytes, self.found_bytes = allocator_bytes(self.device).allocated, None

    def around(self, program, bound):
        return self._looking if IS_BACKWARD[program.op[bound.row]] and bound.awaits is None else None

    @contextmanager
    def _looking(self, step):
        if self.found_bytes is None:
            self.found_bytes = allocator_bytes(self.device).allocated
        yield


def kept_of_sent_outputs(rank, num_ranks, wide, num_microbatches):
    """Return how much more is held before the first backward than when the step began."""
    device = torch.device("emu", rank)
    look = AtFirstBackward(device)
    layers = [nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)]
    pipeline = Pipeline(
        layers, "gpipe", num_microbatches, nn.functional.mse_loss, device=device, observers=[look],
        transport=transport_of(rank, num_ranks, device), frees_other_stages=False, run_ahead=None,
    )  # fmt: skip
    batch = torch.zeros(num_microbatches, WIDTH, device=device)
    for _ in range(2):
        pipeline.step(batch, target=batch)
    pipeline.close()
    return look.found_bytes - look.begin_bytes


@pytest.mark.feature("D2")
def test_outputs_that_have_left_take_no_memory(emulated):
    """The host waits for its first gradient, which the other rank sends when it has all outputs."""
    wide, num_microbatches = 4096, 8

    first, _ = emulated.run(kept_of_sent_outputs, wide, num_microbatches, num_ranks=2)

    assert first < 3 * 4 * wide  # of 8 outputs; the gradient of one is there too


@pytest.mark.feature("C1", "C3", "C4", "C15")
@pytest.mark.parametrize("messages", ["coalesced", "rendezvous"])
@pytest.mark.parametrize("family", ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zbv", "dualpipe-v"])
def test_groups_and_sends_that_wait_change_no_bit(emulated, family, messages):
    expect_equal_training(emulated, Cell(family, "plain", 4, messages=messages))


COMPILED = [Cell("zb-h1", "compiled", 2, 1), Cell("interleaved-1f1b", "compiled", 2, 2)]


def few_of(cells):
    """Mark all cells but one per feature slow, of another family for each."""
    families = {feature: FAMILIES[number % len(FAMILIES)] for number, feature in enumerate(FEATURES)}
    families |= {"slices": "seq1f1b", "overlapped pairs": "dualpipe-v", "compiled": "zb-h1"}
    quick = {cell.feature: cell for cell in cells if cell.family == families[cell.feature]}.values()
    return [pytest.param(cell, id=str(cell), marks=() if cell in quick else pytest.mark.slow) for cell in cells]


@pytest.mark.feature("C14", "H1", "H2", "H3")
@pytest.mark.parametrize("cell", few_of([*cells(), *COMPILED]))
def test_a_training_is_the_cpus_to_the_bit_and_nothing_is_left_to_chance(emulated, cell):
    ranks = expect_equal_training(emulated, cell)

    follows = cell.run_ahead is not None and not FEATURES[cell.feature].is_overlapped
    assert [rank.calls["follow"] > 0 for rank in ranks] == [follows] * cell.num_ranks


@pytest.mark.feature("H2")
@pytest.mark.parametrize("cell", few_of(cells()[3::5]))
def test_no_order_in_which_the_queues_run_changes_a_bit(emulated, cell):
    expect_equal_training(emulated, cell, "random", 7)


@pytest.mark.full
@pytest.mark.parametrize(("policy", "seed"), POLICIES[1:])
@pytest.mark.parametrize("cell", cells(), ids=str)
def test_no_policy_changes_a_bit(emulated, cell, policy, seed):
    expect_equal_training(emulated, cell, policy, seed)


def launches_of_a_step(rank, num_ranks):
    """Return the batches and the messages of a second step, and the communicators."""
    device = torch.device("emu", rank)
    transport = transport_of(rank, num_ranks, device, coalesces=True)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks)]
    pipeline = Pipeline(
        layers, "1f1b", 8, nn.functional.mse_loss, transport=transport, device=device, messages="coalesced",
        frees_other_stages=False,
    )  # fmt: skip
    batch = torch.ones(8, WIDTH, device=device)
    pipeline.step(batch, target=batch)
    transport._groups.backend = backend = Mock(wraps=transport._groups.backend)
    pipeline.step(batch, target=batch)
    num_communicators = len(transport._backends)
    pipeline.close()
    return backend._end_coalescing.call_count, backend.send.call_count + backend.recv.call_count, num_communicators


@pytest.mark.feature("C1")
def test_a_middle_rank_launches_17_batches_for_32_messages_over_one_communicator(emulated):
    assert emulated.run(launches_of_a_step, num_ranks=4)[1:3] == [(17, 32, 1), (17, 32, 1)]
