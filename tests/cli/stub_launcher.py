"""A command that launches stub ranks: `stub_launcher.py MODE FOLDER NUM_RANKS`."""

import sys
from pathlib import Path

from penstock.cli.lifetime import interrupts_handled_by, leave_at_once


def main():
    mode, folder, num_ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with interrupts_handled_by(leave_at_once):
        from penstock.cli.launch import launch_ranks

        command = [sys.executable, str(Path(__file__).with_name("stub_rank.py")), mode, folder]
        try:
            failure = launch_ranks(command, num_ranks=num_ranks)
        except KeyboardInterrupt:
            return 130
    return failure.status if failure else 0


sys.exit(main())
