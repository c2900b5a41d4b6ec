"""How arrays are split over devices.

mesh.py makes the device mesh and names its axes; open it first. batches.py has
the shardings of batches, layouts.py the rules for parameters and optimizer
state, and traced.py the functions that models call while they are traced. Other
packages use the names below. Any package may import this one, which imports
only settings and trees.
"""

from bigtrain.sharding.batches import (
  batch,
  batch_spec,
  batch_ways,
  check_batch,
  one_example,
  replicated,
)
from bigtrain.sharding.layouts import (
  DEFAULT_RULES,
  Layout,
  along,
  bytes_per_device,
  state_shardings,
  state_spec,
)
from bigtrain.sharding.mesh import (
  AXES,
  BATCH_AXES,
  from_config,
  in_words,
  make_mesh,
)
from bigtrain.sharding.traced import (
  ambient,
  device,
  length_ways,
  over_batch,
  split_batch,
  splits,
  stream,
)

__all__ = [
  "AXES",
  "BATCH_AXES",
  "DEFAULT_RULES",
  "Layout",
  "along",
  "ambient",
  "batch",
  "batch_spec",
  "batch_ways",
  "bytes_per_device",
  "check_batch",
  "device",
  "from_config",
  "in_words",
  "length_ways",
  "make_mesh",
  "one_example",
  "over_batch",
  "replicated",
  "split_batch",
  "splits",
  "state_shardings",
  "state_spec",
  "stream",
]
