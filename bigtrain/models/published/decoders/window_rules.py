"""Windows of decoders: which layers see only the nearest positions.

Newer files list the type of each layer in `layer_types`; for older ones, the
library has a function of the layer's number (`LayerTypes`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bigtrain.models.published.families import ConfigJson, Rule
from bigtrain.models.published.layer_patterns import ByLayer

SLIDING, FULL = "sliding_attention", "full_attention"


class LayerTypes(NamedTuple):
  """The types of a model's layers: with a window, or of full attention."""

  # Whether layer i has a window, for files without `layer_types`.
  slides: Callable[[ConfigJson, int], Any]
  # {further key that `slides` reads: its value if absent}.
  keys: Mapping[str, Any] = {}

  def read(self, config: ConfigJson) -> list[str]:
    given, depth = config["layer_types"], config["num_hidden_layers"]
    if given is None:
      return [SLIDING if self.slides(config, i) else FULL for i in range(depth)]
    if len(given) != depth or not {*given} <= {SLIDING, FULL}:
      raise config.error(
        f"layer_types={given!r}: expected {SLIDING!r} or {FULL!r} for each "
        f"of the {depth} layers."
      )
    return list(given)


def full_every(period: int, key: str | None = None) -> LayerTypes:
  """Layers of which the last of each period has no window.

  Args:
    key: a key that may change the period.
  """

  def slides(config: ConfigJson, i: int) -> bool:
    return (i + 1) % (config[key] if key else period) != 0

  return LayerTypes(slides, {key: period} if key else {})


def windows(
  types: LayerTypes,
  *,
  switch: str | None = None,
  default: int | None = 4096,
  rotates: str | None = None,
) -> Rule:
  """A window, `sliding_window`, in the layers of one type.

  Args:
    switch: a key that turns windows on; it is false if absent.
    default: the window of files without the key.
    rotates: the only type of layer that has rotary embeddings.
  """

  def read(config: ConfigJson) -> dict[str, Any]:
    window = config["sliding_window"] or None
    if switch and not config[switch]:
      window = None
    kinds = types.read(config)
    result = {
      "window": ByLayer(window if kind == SLIDING else None for kind in kinds)
    }
    if rotates:
      result["posemb"] = ByLayer(
        "rope" if kind == rotates else "none" for kind in kinds
      )
    return result

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    windows = fields["window"]
    sizes = [window for window in windows if window is not None]
    # The library makes a mask for each type, whether layers use it or not.
    unused = None if switch else 4096
    config = {
      "layer_types": [
        FULL if window is None else SLIDING for window in windows
      ],
      "sliding_window": sizes[0] if sizes else unused,
    }
    return config | ({switch: bool(sizes)} if switch else {})

  keys = {"sliding_window": default, "layer_types": None, **types.keys}
  if switch:
    keys[switch] = False
  fields = ("window", "posemb") if rotates else ("window",)
  return Rule(fields, keys, read, write)
