"""Biases of decoders: which keys of config.json add them, and where."""

from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.models.published.families import ConfigJson, Rule

# Where a decoder may have biases, in the order of its field `use_bias`: the
# projections of attention without or with its output gate, the projection of
# its output, MLPs, layer norms, experts, the router, the head.
SITES = (
  "qkv_without_gate",
  "qkv",
  "out",
  "mlp",
  "norm",
  "experts",
  "router",
  "head",
)


def biases(always: Sequence[str] = (), **keys: Sequence[str]) -> Rule:
  """Biases of the sites `always`, and of those that keys add.

  Args:
    **keys: {key of config.json: sites that have biases if it is true}.
  """

  def read(config: ConfigJson) -> dict[str, Any]:
    sites = {*always}
    for key, key_sites in keys.items():
      if config[key]:
        sites |= {*key_sites}
    return {"use_bias": [site for site in SITES if site in sites] or False}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    sites = {*fields["use_bias"]}
    # A model may lack some of a key's sites, such as MLPs. If it lacks only
    # their biases, the exported config would be read as a different model.
    return {
      key: not sites.isdisjoint(key_sites) for key, key_sites in keys.items()
    }

  return Rule(("use_bias",), dict.fromkeys(keys, False), read, write)
