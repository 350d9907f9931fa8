"""`python -m speedrun` is the `speedrun` command."""

import sys

from speedrun.cli import main

sys.exit(main())
