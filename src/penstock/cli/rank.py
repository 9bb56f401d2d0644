"""Run as one rank, and tell a failure once: to the launcher that started this rank, or on standard error."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from typing import NoReturn

import torch.distributed as dist

from penstock.cli.failure import RankFailure, write_failure, write_finished
from penstock.cli.launch import attempt_prefix, connect_store
from penstock.cli.lifetime import launcher_of
from penstock.cli.output import complain
from penstock.cli.status import ExitStatus, message_of
from penstock.errors import PenstockError

TELL_TIMEOUT = timedelta(seconds=2)


def run_rank(body: Callable[[], None], *, environment: Mapping[str, str]) -> ExitStatus:
    """Run `body` as the rank that `environment` names; a failure ends this process here, with its error's status."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        body()
        if dist.is_initialized():
            dist.destroy_process_group()
        if launcher_of(environment) is not None:
            write_finished(connect_store(environment, TELL_TIMEOUT), int(environment["RANK"]))
    except BaseException as error:
        _fail(error, environment)
    return ExitStatus.FINE


def _fail(error: BaseException, environment: Mapping[str, str]) -> NoReturn:
    """Tell the failure and leave at once: threads of a broken process group could hold up an orderly exit."""
    failure = RankFailure.of(error, int(environment.get("RANK", "0")), message_of(error))
    if failure.status != ExitStatus.INTERRUPTED:
        _tell(failure, environment)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader of the stream may be gone
            stream.flush()
    os._exit(failure.status)


def _tell(failure: RankFailure, environment: Mapping[str, str]) -> None:
    if launcher_of(environment) is not None:
        try:
            write_failure(connect_store(environment, TELL_TIMEOUT), failure)
            return
        except (dist.DistError, PenstockError) as error:
            complain(f"rank {failure.rank}: cannot tell the launcher ({error})")
    if _is_first_to_tell(failure, environment):
        complain(failure.shown)


def _is_first_to_tell(failure: RankFailure, environment: Mapping[str, str]) -> bool:
    """Return whether no other rank has reported the same yet: torchrun's store knows, where there is one."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        is_met_by_all = failure.status == ExitStatus.WRONG_INPUT and not dist.is_initialized()
        return not is_met_by_all or environment.get("LOCAL_RANK", "0") == "0"
    key = f"{attempt_prefix(environment)}/penstock/reported/{sha256(failure.message.encode()).hexdigest()}"
    try:
        return connect_store(environment, TELL_TIMEOUT).add(key, 1) == 1
    except (dist.DistError, PenstockError):
        return True
