"""Runs side by side: how far each has come, what it reached, and what it was set to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from statistics import median

from penstock.errors import ConfigError, PenstockError
from penstock.train.folder.run_folder import CONFIG, METRICS, SUMMARY
from penstock.train.folder.run_lock import holder_of
from penstock.train.settings.config import RunConfig, load_config
from penstock.train.watching.metrics import PEAK_BYTES, read_metrics

SKIPPED_STEPS = 3
"""The number of steps at a run's begin, which take longer than later ones."""
ASIDE = ("run", "checkpoint", "metrics", "sample", "profile", "debug")
"""Sections that decide nothing of what is learned or how fast, but for the seed."""

PATTERN_SIGNS = "*?["


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as it lies in its folder."""

    name: str
    folder: Path
    state: str
    """The word finished, running or interrupted."""
    config: RunConfig
    rows: Sequence[Mapping[str, float]]
    """The rows of its `metrics.jsonl`, by step."""

    @property
    def step(self) -> int:
        """The last step with numbers; 0 where there is none."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def tokens_per_s(self) -> float | None:
        """The median of tokens per second over all steps but the first ones; None where no step has them."""
        rates = [row["tokens_per_s"] for row in self.rows[SKIPPED_STEPS:] or self.rows if "tokens_per_s" in row]
        return median(rates) if rates else None

    @property
    def peak_bytes(self) -> list[float]:
        """The most memory of each rank, as it was last gathered; empty where it was not."""
        gathered = [row for row in self.rows if f"{PEAK_BYTES}0" in row]
        return [value for key, value in gathered[-1].items() if key.startswith(PEAK_BYTES)] if gathered else []

    def last(self, key: str) -> float | None:
        """Return the last number of this name; None where there is none."""
        return next((row[key] for row in reversed(self.rows) if key in row), None)

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a number of this name, and the numbers."""
        points = [(int(row["step"]), row[key]) for row in self.rows if key in row]
        return [step for step, _ in points], [value for _, value in points]


def list_runs(places: Sequence[str | Path]) -> tuple[list[RunRecord], list[str]]:
    """Return the runs at places, and a line with the reason for each run whose files cannot be read.

    A place is a run's folder, a folder of such, or a pattern of these (`runs/lr-*`). The runs are in the order of the
    places, and of their names at each; there is at least one.

    Raises:
        ConfigError: a place has none, or none can be read.
        FormatError, PenstockError: the files of the only one cannot be read.
    """
    folders_by_name = _folders_by_name([folder for place in places for folder in _folders_at(str(place))])
    runs, unreadable = [], []
    for name, folder in folders_by_name.items():
        try:
            runs.append(_record_of(folder, name))
        except PenstockError as error:
            if len(folders_by_name) == 1:
                raise
            unreadable.append(f"run {name} is left out: {error}")
    if not runs:
        raise ConfigError("\n".join(["no run can be read:", *unreadable]), key="DIR")
    return runs, unreadable


def _folders_at(place: str) -> list[Path]:
    """Return the folders of the runs at one place, by name; at least one. Raises: ConfigError."""
    folder = Path(place)
    if not folder.exists() and any(sign in place for sign in PATTERN_SIGNS):
        run_folders = sorted(run for path in glob(place, recursive=True) for run in _runs_in(Path(path)))
        if not run_folders:
            raise ConfigError(f"no folder that {place!r} matches holds a run; give folders of runs", key="DIR")
        return run_folders
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give a run's folder, or one that holds such", key="DIR")
    run_folders = _runs_in(folder)
    if not run_folders:
        raise ConfigError(f"{folder} holds no run: neither it nor a folder in it has a {CONFIG}", key="DIR")
    return run_folders


def _runs_in(folder: Path) -> list[Path]:
    if (folder / CONFIG).is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))


def _folders_by_name(folders: Sequence[Path]) -> dict[str, Path]:
    """Name each folder once, by its own name, or by its path where another one is called the same."""
    folder_by_path: dict[Path, Path] = {}
    for folder in folders:
        folder_by_path.setdefault(folder.resolve(), folder)
    names = [path.name for path in folder_by_path]
    return {
        path.name if names.count(path.name) == 1 else str(folder): folder for path, folder in folder_by_path.items()
    }


def _record_of(folder: Path, name: str) -> RunRecord:
    config = load_config(folder / CONFIG)
    try:
        rows = read_metrics(folder / METRICS)
    except FileNotFoundError:
        rows = []  # metrics.jsonl = false, or no step has ended
    except OSError as error:
        raise PenstockError(f"{folder / METRICS} cannot be read: {error.strerror}") from error
    is_finished = (folder / SUMMARY).exists()
    state = "finished" if is_finished else "running" if holder_of(folder) else "interrupted"
    return RunRecord(name, folder, state, config, rows)


def differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return, per run, the settings that decide what it learns in which not all agree, such as `batch.size=32`."""
    settings = [{"run.seed": run.config.run.seed} for run in runs]
    for run_settings, run in zip(settings, runs, strict=True):
        for name, section in run.config:
            run_settings.update({f"{name}.{key}": value for key, value in section if name not in ASIDE})
    keys = [key for key in settings[0] if len({str(run_settings[key]) for run_settings in settings}) > 1]
    return [[f"{key}={run_settings[key]}" for key in keys] for run_settings in settings]
