"""`python -m penstock`: the command line where the `penstock` script is not installed; ranks start this way too."""

import sys

from penstock.cli import main

sys.exit(main())
