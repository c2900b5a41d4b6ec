"""What the parts of a run share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from bigtrain.config import settings
from bigtrain.config.lengths import Lengths
from bigtrain.runtime.programs import Programs


@dataclasses.dataclass(frozen=True)
class Run:
  """A run of the program; `plain` is the config as a dict.

  The batch size is the number of examples per step, over all devices.
  """

  config: settings.Config
  plain: Mapping[str, Any]
  workdir: str
  mesh: Mesh
  programs: Programs
  seed: int
  batch_size: int
  lengths: Lengths
