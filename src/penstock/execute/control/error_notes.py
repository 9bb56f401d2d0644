"""Where in the user's own code an error was raised: a layer, the loss function.

An error keeps its type and its message; the place is a note of it, which tracebacks show too.
"""

_INTRODUCTION = "raised in "
_ADVICE = "of its rank: "


def note_place(error: BaseException, place: str) -> None:
    """Note on an error where it was raised, as in `layer 3 (Linear)`; what is noted first, the innermost, stays."""
    if not noted_place(error):
        error.add_note(f"{_INTRODUCTION}{place}")


def noted_place(error: BaseException) -> str:
    """Return the place that was noted on an error; empty where none was."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_INTRODUCTION)]
    return notes[0].removeprefix(_INTRODUCTION) if notes else ""


def note_advice(error: BaseException, advice: str) -> None:
    """Note on an error what its rank says beside it."""
    error.add_note(f"{_ADVICE}{advice}")


def noted_advice(error: BaseException) -> list[str]:
    """Return what was noted by `note_advice`."""
    return [note.removeprefix(_ADVICE) for note in getattr(error, "__notes__", ()) if note.startswith(_ADVICE)]


def without_target(place: str, target: object) -> str:
    """Return a place to which the target goes, and that none was given, if so: what is raised there may not tell."""
    return place if target is not None else f"{place} (no target was given; pass step(..., target=...))"
