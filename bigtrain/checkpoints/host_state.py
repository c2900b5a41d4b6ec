"""What the host's side of a run saves beside the arrays of a checkpoint.

It is the entry "host_state" of the manifest. Nothing here needs jax.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class HostState:
  """State of a run that is not in arrays on devices; all of it is JSON.

  Attributes:
    config: resolved config of the run; None if unknown.
    tally: sums over the steps since the last row (step/tally.py).
    clock: time accounts (reports/chrono.py); None for a clock that starts now.
    hooks: state of the hooks (runtime/hooks.py).
    batches_ahead: number of batches that rollbacks have skipped: the batch
      index leads the step by this number.
    fingerprints: file -> fingerprint of its content, for the files that input
      is made with, such as tokenizers.
    data: what the data calls things, see inputs/description.py.
  """

  config: dict[str, Any] | None = None
  tally: dict[str, Any] = dataclasses.field(default_factory=dict)
  clock: dict[str, Any] | None = None
  hooks: dict[str, Any] = dataclasses.field(default_factory=dict)
  batches_ahead: int = 0
  fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
  data: dict[str, Any] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    """Returns the record as a dict, without the fields that are None."""
    values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    return {name: x for name, x in values.items() if x is not None}

  @classmethod
  def from_json(cls, content: Mapping[str, Any]) -> "HostState":
    """Reads a record of any version of the program.

    Fields that `content` lacks get their defaults; unknown keys are ignored.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: x for name, x in content.items() if name in names})
