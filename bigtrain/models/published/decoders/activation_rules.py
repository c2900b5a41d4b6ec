"""Activations of decoders' MLPs: their names in config.json, and here."""

from collections.abc import Mapping

from bigtrain.models.published.families import ConfigJson, Rule, choice

# {activation of a gated MLP in the library: our kind of MLP}.
GATED: Mapping[str, str] = {
  "silu": "swiglu",
  "swish": "swiglu",
  "gelu_pytorch_tanh": "geglu",
  "gelu_new": "geglu",
  "gelu_fast": "geglu",
  "gelu_accurate": "geglu",
  "gelu_python_tanh": "geglu",
  "gelu": "geglu_erf",
  "gelu_python": "geglu_erf",
  "quick_gelu": "geglu_quick",
  "relu": "reglu",
  "relu2": "reglu2",
}
# The same of an MLP without a gate.
PLAIN: Mapping[str, str] = {
  "gelu_new": "gelu",
  "gelu_pytorch_tanh": "gelu",
  "gelu_fast": "gelu",
  "gelu_accurate": "gelu",
  "gelu_python_tanh": "gelu",
  "gelu": "gelu_erf",
  "gelu_python": "gelu_erf",
  "quick_gelu": "gelu_quick",
  "relu": "relu",
  "relu2": "relu2",
  "silu": "silu",
  "swish": "silu",
}


def activation(
  names: Mapping[str, str], default: str, key: str = "hidden_act"
) -> Rule:
  """The kind of MLP by its activation; `default` is that of other files."""
  return choice("mlp", key, {default: names[default], **names})


def plain_activation(config: ConfigJson, key: str = "hidden_act") -> str:
  """The kind of MLP without a gate that has the activation of a key."""
  config.require(key, *PLAIN)
  return PLAIN[config[key]]


def gated_silu() -> Rule:
  """An MLP gated by SiLU, which the library has elsewhere in the layers too."""
  return choice("mlp", "hidden_act", {"silu": "swiglu", "swish": "swiglu"})
