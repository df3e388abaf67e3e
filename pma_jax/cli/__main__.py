"""`python -m pma_jax.cli`: the command line without an installed script."""

import sys

from pma_jax.cli.command import main

sys.exit(main())
