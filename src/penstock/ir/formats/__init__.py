"""Texts of schedules and programs: the names of the formats, which `ir/reading.py` and `ir/writing.py` look up."""

READABLE = ("csv", "json", "grid", "deepspeed", "megatron")
WRITABLE = ("csv", "json", "grid", "deepspeed", "deepspeed-old", "megatron")
"""`deepspeed-old` is DeepSpeed's order before it sent gradients first; it is read as `deepspeed`."""

WITH_COMMUNICATION = ("csv", "json")
"""The formats in which a program can be written and read again."""

FORMAT_OF_SUFFIX = {
    ".csv": "csv",
    ".json": "json",
    ".txt": "grid",
    ".grid": "grid",
    ".deepspeed": "deepspeed",
    ".megatron": "megatron",
}
"""In which format a file is written whose name ends so."""
