"""Query-key clipping: config.qk_clip, and attention logits in log entries.

  config.qk_clip = dict(tau=100.0, alpha=0.5)

Together with Muon this is MuonClip, but it works with any optimizer.
`from_config` makes the model report the largest logits of a step, see
attention_logits.py, and gradients.py merges them. `QkClip` then changes the
updates of chain.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.arrays import trees
from bigtrain.arrays.types import Metrics, Params
from bigtrain.config.errors import ConfigError, check_kwargs, check_number
from bigtrain.config.settings import Config
from bigtrain.metrics import Largest
from bigtrain.models.layers import attention_logits, layer_kinds

_KEY = "config.qk_clip"


class QkClip(NamedTuple):
  """Options of config.qk_clip."""

  tau: float = 100.0  # Largest logit that is not clipped.
  # Queries shrink by gamma^alpha, and keys by gamma^(1 - alpha).
  alpha: float = 0.5

  def clipped(self, updates: Params, params: Params, logits: Any) -> Params:
    """Changes the updates so that the projections of clipped heads shrink.

    Args:
      updates: updates of the optimizer, which are added to the parameters.
      logits: the largest logits of the step, see attention_logits.py.
    """
    factors = attention_logits.factors(params, logits, self.tau, self.alpha)

    def clip(name: str, u: jax.Array, p: jax.Array) -> jax.Array:
      if name not in factors:
        return u
      # The parameter becomes factor * (p + u). A factor of 1 changes nothing.
      factor = factors[name].astype(u.dtype)
      return factor * u + (factor - 1) * p.astype(u.dtype)

    return trees.map_with_names(clip, updates, params)


def from_config(config: Config, model: Any) -> tuple[QkClip | None, Any]:
  """(options or None, the model, which reports its logits if needed)."""
  if config.get("qk_clip") is None:
    return None, model
  options = config.kwargs("qk_clip")
  check_kwargs(QkClip, options, _KEY)
  clip = QkClip(**options)
  check_number(f"{_KEY}.tau", clip.tau, above=0)
  check_number(f"{_KEY}.alpha", clip.alpha, least=0, most=1)
  _check_model(model, config.model_name)
  return clip, model.clone(attention_logits=True)


def _check_model(model: Any, name: str) -> None:
  if not hasattr(model, "attention_logits"):
    raise ConfigError(
      f"{_KEY}: config.model_name={name!r} reports no logits of attention; "
      "expected 'decoder' or 'vision_language'."
    )
  key = "config.model"
  if hasattr(model, "text_decoder"):  # Its tower is not clipped.
    key = f"{key}.text"
    model = model.text_decoder()
  layers = layer_kinds.of_model(model).of_all(model.depth)
  attending = [block for block in layers if block.deltanet is None]
  if not attending:
    raise ConfigError(f"{_KEY}: {key} has no layer with attention.")
  # Fields that would undo a smaller kernel, or shrink values along with keys.
  for field in ("qk_norm", "qkv_clip", "keys_as_values"):
    values = [getattr(block, field) for block in attending]
    if any(values):
      raise ConfigError(
        f"{_KEY}: {key}.{field}={next(filter(None, values))!r}: "
        "expected layers whose logits are products of the kernels of queries "
        "and keys."
      )


def logit_metrics(logits: Any) -> Metrics:
  """{"attention_logit": ...} from the largest logits of a step; {} for None."""
  if logits is None:
    return {}
  by_layer = attention_logits.by_layer(logits)
  largest = jnp.stack([jnp.max(x_H) for x_H in by_layer.values()])
  return {"attention_logit": Largest.of(largest, tuple(by_layer))}
