"""How arrays are split over devices.

mesh.py makes the device mesh and names its axes; open it first. batches.py has
the shardings of batches, layouts.py the rules for parameters and optimizer
state, model_rules.py the rules of a model, and memory.py what stays in host
memory. Models call the functions of traced.py, lookup.py and, for the axis
`tensor`, tensor.py while they are traced. Other packages use the names below.
Any package may import this one, which imports only settings, trees and
dims.
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
  Rules,
  along,
  largest_free,
  spec_of,
  state_shardings,
  state_spec,
)
from bigtrain.sharding.lookup import lookup
from bigtrain.sharding.memory import (
  bytes_per_device,
  in_host,
  in_memory_of,
  on_device,
)
from bigtrain.sharding.memory import read as read_opt_memory
from bigtrain.sharding.mesh import (
  AXES,
  BATCH_AXES,
  from_config,
  in_words,
  make_mesh,
)
from bigtrain.sharding.model_rules import place
from bigtrain.sharding.tensor import (
  axes_of_length,
  by_heads,
  columns,
  gathered,
  heads_in_parts,
  rows,
  scattered,
  stream,
  stream_spec,
  tensor_ways,
)
from bigtrain.sharding.traced import (
  ambient,
  device,
  length_ways,
  over_batch,
  split_batch,
  splits,
)

__all__ = [
  "AXES",
  "BATCH_AXES",
  "DEFAULT_RULES",
  "Layout",
  "Rules",
  "along",
  "ambient",
  "axes_of_length",
  "batch",
  "batch_spec",
  "batch_ways",
  "by_heads",
  "bytes_per_device",
  "check_batch",
  "columns",
  "device",
  "from_config",
  "gathered",
  "heads_in_parts",
  "in_host",
  "in_memory_of",
  "in_words",
  "largest_free",
  "length_ways",
  "lookup",
  "make_mesh",
  "on_device",
  "one_example",
  "over_batch",
  "place",
  "read_opt_memory",
  "replicated",
  "rows",
  "scattered",
  "spec_of",
  "split_batch",
  "splits",
  "state_shardings",
  "state_spec",
  "stream",
  "stream_spec",
  "tensor_ways",
]
