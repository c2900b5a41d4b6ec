"""What the parts of a run share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from bigtrain import settings
from bigtrain.lengths import Lengths
from bigtrain.runtime.programs import Programs


@dataclasses.dataclass(frozen=True)
class Run:
  """A run of the program.

  Attributes:
    config: the whole config, which records the keys that are read.
    plain: the same as a plain dict.
    workdir: absolute path of the run's folder.
    mesh: devices of all processes.
    programs: compiles the run's programs.
    seed: config.seed.
    batch_size: examples per step, over all devices.
    lengths: lengths in steps.
  """

  config: settings.Config
  plain: Mapping[str, Any]
  workdir: str
  mesh: Mesh
  programs: Programs
  seed: int
  batch_size: int
  lengths: Lengths
