"""Trains several configs, one after the other, in one process of a job.

  python -m faults.train_several CONFIG WORKDIR [CONFIG WORKDIR ...]

This saves most of the time where imports take longer than training.
"""

import sys

from bigtrain import main
from bigtrain.cluster import process
from bigtrain.config import loading

if __name__ == "__main__":
  for config, workdir in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    main.train(loading.load(config), workdir)
  process.exit_now(process.EXIT_OK)
