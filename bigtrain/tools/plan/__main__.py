"""Runs `python -m bigtrain.tools.plan`."""

import sys

from bigtrain.tools.plan import plan

if __name__ == "__main__":
  sys.exit(plan.main())
