"""Options of scaled rotary embeddings, by type.

These are the names in config.model.rope_scaling, which
models/layers/positions.py uses. The `rope_parameters` of published models have
the same names, except for original_len (models/published/rope_rules.py).
"""

from collections.abc import Mapping
from typing import NamedTuple


class RopeScaling(NamedTuple):
  """The options of a type of scaling, besides `type`."""

  required: tuple[str, ...]
  optional: tuple[str, ...] = ()  # None where they are not given.
  defaults: Mapping[str, float | bool] = {}  # Options with another default.

  @property
  def names(self) -> tuple[str, ...]:
    return (*self.required, *self.optional, *self.defaults)


ROPE_SCALINGS: Mapping[str, RopeScaling] = {
  # All frequencies divided by a factor, https://arxiv.org/abs/2306.15595.
  "linear": RopeScaling(required=("factor",)),
  # A larger base for texts longer than original_len, such as InternLM 3.
  "dynamic": RopeScaling(required=("factor", "original_len")),
  # Low frequencies divided, as in Llama 3, https://arxiv.org/abs/2407.21783.
  "llama3": RopeScaling(
    required=("factor", "low_freq_factor", "high_freq_factor", "original_len")
  ),
  # https://arxiv.org/abs/2309.00071. The defaults are the paper's.
  "yarn": RopeScaling(
    required=("factor", "original_len"),
    optional=("mscale", "mscale_all_dim", "attention_factor"),
    defaults={"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
  ),
  # Frequencies of the whole width, of which the highest rotate, as in Gemma 4.
  "proportional": RopeScaling(required=("fraction",), defaults={"factor": 1.0}),
  # A divisor for each frequency, and others for texts longer than original_len,
  # https://arxiv.org/abs/2402.13753.
  "longrope": RopeScaling(
    required=("short_factor", "long_factor", "original_len"),
    optional=("factor", "attention_factor"),
  ),
}
