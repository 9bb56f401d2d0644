"""What ranks held is shown in two tables."""

from dataclasses import replace

from penstock.execute.observing.rank_memory import MemoryPoint, Moment, RankMemory, StageMemory, memory_text

KIB = 1024
POINT = MemoryPoint("begin", 8 * KIB, None, None)
RANK = RankMemory(
    1,
    (StageMemory(1, 4 * KIB, 4 * KIB, 3, 6 * KIB, 0), StageMemory(2, KIB, KIB, 2, 2 * KIB, KIB)),
    received_bytes=512,
    unsent_bytes=256,
    optimizer_bytes=None,
    peak_activations=6,
    points=tuple(replace(POINT, name=name) for name in Moment),
)


def cells(line):
    return [cell for cell in line.split("  ") if cell.strip()]


def test_each_stage_has_a_row_and_messages_are_told_once_per_rank():
    lines = memory_text([RANK]).splitlines()

    assert lines[0] == "memory, when a rank holds most"
    first, second = (line for line in lines if line.lstrip().startswith("1 ") and "KiB" in line and "8.00" not in line)
    assert [cell.strip() for cell in cells(first)] == [
        "1", "1", "3", "6.00 KiB", "0 B", "4.00 KiB", "4.00 KiB", "512 B", "256 B",
    ]  # fmt: skip
    assert [cell.strip() for cell in cells(second)] == [
        "1", "2", "2", "2.00 KiB", "1.00 KiB", "1.00 KiB", "1.00 KiB",
    ]  # fmt: skip


def test_optimizers_states_predictions_and_an_allocators_figures_are_there_where_they_were_counted():
    on_device = (MemoryPoint("begin", 8 * KIB, 16 * KIB, 32 * KIB), *RANK.points[1:])
    given = replace(RANK, rank=2, optimizer_bytes=3 * KIB)

    lines = memory_text([RANK, given], [9 * KIB, 7 * KIB]).splitlines()
    text = memory_text([replace(RANK, points=on_device)])

    assert lines[-4].endswith("end  optimizer  predicted peak")
    assert [line.split()[-5:] for line in lines[-2:]] == [
        ["8.00", "KiB", "-", "9.00", "KiB"],
        ["KiB", "3.00", "KiB", "7.00", "KiB"],
    ]
    assert "optimizer" not in text
    assert "most live" in text
    assert "8.00 KiB (16.0 KiB allocated, 32.0 KiB reserved)" in text
