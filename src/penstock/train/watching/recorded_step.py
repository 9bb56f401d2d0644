"""The recorded step of a run: the timeline that lies in its folder."""

from pathlib import Path

from penstock.errors import ConfigError
from penstock.ir.timeline import Timeline
from penstock.train.folder.run_folder import CONFIG, TIMELINE


def read_recorded_step(folder: Path) -> Timeline:
    """Read the recorded step of a run folder.

    Raises:
        ConfigError: the folder is none, or lacks what is needed; says what, and how to get it.
        FormatError: the file is not whole.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder; give the run folder of `penstock train` (run.folder), or the .json file of a "
            "timeline that was saved"
        )
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{folder} holds no {CONFIG}, so it is no run folder; give the one that run.folder names")
    path = folder / TIMELINE
    if not path.exists():
        raise ConfigError(
            f"{folder} holds no {TIMELINE}: the run has not come to its recorded step, or records none. Let it train "
            "on, or run it with --set run.record_step=N, where N is a step that it reaches"
        )
    return Timeline.load(path)
