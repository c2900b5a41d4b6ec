"""How arrays are split over devices.

Open mesh.py first: it makes the device mesh and names its axes. batches.py has
the shardings of batches and the ambient mesh of a traced program, rules.py the
layout of parameters and optimizer state, memory.py the placement of optimizer
state in host memory, chosen.py takes examples out of a batch, tensor.py has the
products of layers that are split over `tensor`, and absent.py devices that
exist only for the compiler. Other packages use the names below, and may all
import this one; it imports arrays and config.
"""

from bigtrain.sharding.absent import absent_devices
from bigtrain.sharding.batches import (
  ambient,
  batch,
  batch_axes,
  batch_spec,
  batch_ways,
  check_batch,
  device,
  from_microbatches,
  in_stage,
  length_ways,
  one_example,
  over_batch,
  replicated,
  schedule,
  split_batch,
  splits,
  to_microbatches,
)
from bigtrain.sharding.chosen import take, take_everywhere
from bigtrain.sharding.memory import (
  bytes_per_device,
  in_host,
  in_memory_of,
  on_device,
  read_opt_memory,
)
from bigtrain.sharding.mesh import (
  AXES,
  BATCH_AXES,
  Schedule,
  from_config,
  in_words,
  make_mesh,
  schedule_of,
)
from bigtrain.sharding.rules import (
  DEFAULT_RULES,
  Rules,
  along,
  experts_or_rows,
  largest_free,
  place,
  spec_of,
  state_shardings,
  state_spec,
  with_shardings,
)
from bigtrain.sharding.tensor import (
  axes_of_length,
  by_heads,
  columns,
  gathered,
  heads_in_parts,
  lookup,
  rows,
  scattered,
  stream,
  stream_spec,
  tensor_ways,
)
