"""The facts about a run that its parts share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from bigtrain.config import settings
from bigtrain.config.lengths import Lengths
from bigtrain.runtime.programs import Programs


@dataclasses.dataclass(frozen=True)
class Run:
  """A run of the program."""

  config: settings.Config
  plain: Mapping[str, Any]  # The config as a dict.
  workdir: str
  mesh: Mesh
  programs: Programs
  seed: int
  batch_size: int  # Number of examples per step, over all devices.
  lengths: Lengths
