"""Runs `python -m bigtrain.tools.plan`."""

import sys

from bigtrain.tools.plan import plan

sys.exit(plan.main())
