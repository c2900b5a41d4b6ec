"""Makes hf_moe.npz: experts of several families, by transformers.

For each family, a layer of experts with random weights: weights and gradients
under our names, an input, an output, and the input's gradient, of the loss
sum(sin(output)). Also the auxiliary loss of three layers' logits. Everything is
float32. requirements.txt has the library's version.

  python tests/golden/make_moe.py
"""

import importlib
import pathlib

import numpy as np
import torch
import transformers

D, F, E, J, SHARED = 5, 6, 8, 3, 4

SIZES = dict(
  hidden_size=D,
  num_attention_heads=1,
  num_key_value_heads=1,
  intermediate_size=F,
  moe_intermediate_size=F,
  num_experts=E,
  num_local_experts=E,
  n_routed_experts=E,
  num_experts_per_tok=J,
  experts_implementation="eager",
)
# {case: (module of transformers, class, fields)}.
CASES = {
  "mixtral": ("mixtral", "MixtralSparseMoeBlock", {}),
  "olmoe": ("olmoe", "OlmoeSparseMoeBlock", dict(norm_topk_prob=False)),
  "granitemoe": ("granitemoe", "GraniteMoeMoE", {}),
  "qwen2_moe": (
    "qwen2_moe",
    "Qwen2MoeSparseMoeBlock",
    dict(norm_topk_prob=False, shared_expert_intermediate_size=SHARED),
  ),
  "glm4_moe": (
    "glm4_moe",
    "Glm4MoeMoE",
    dict(
      n_group=4,
      topk_group=2,
      norm_topk_prob=True,
      routed_scaling_factor=2.5,
      n_shared_experts=2,
    ),
  ),
  "deepseek_v2": (
    "deepseek_v2",
    "DeepseekV2Moe",
    dict(
      topk_method="group_limited_greedy",
      n_group=4,
      topk_group=2,
      routed_scaling_factor=1.5,
      n_shared_experts=1,
    ),
  ),
  "gpt_oss": (
    "gpt_oss",
    "GptOssMLP",
    dict(swiglu_limit=0.7, swiglu_alpha=1.702),
  ),
}


def module(name):
  return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def ours(name, values):
  """Arrays under our names, from those of a layer of transformers."""
  own = {}
  for key, x in values.items():
    x = x.detach().numpy().astype(np.float32)
    key = key.replace("router.", "gate.").replace("shared_experts.", "shared.")
    key = key.replace("shared_expert.", "shared.").removesuffix(".weight")
    if name == "gpt_oss" and key.startswith("experts.gate_up"):
      gate, up = x[..., ::2], x[..., 1::2]  # Kernels multiply from the right.
      kind = "bias" if key.endswith("bias") else "kernel"
      own |= {f"moe/gate/{kind}": gate, f"moe/up/{kind}": up}
    elif name == "gpt_oss" and key.startswith("experts.down"):
      own["moe/down/" + ("bias" if key.endswith("bias") else "kernel")] = x
    elif key == "experts.gate_up_proj":
      gate, up = np.split(np.swapaxes(x, 1, 2), 2, axis=2)
      own |= {"moe/gate/kernel": gate, "moe/up/kernel": up}
    elif key == "experts.down_proj":
      own["moe/down/kernel"] = np.swapaxes(x, 1, 2)
    elif key == "gate":
      own["moe/router/kernel"] = x.T
    elif key == "gate.bias":
      own["moe/router/bias"] = x
    elif key == "gate.e_score_correction_bias":
      own["moe/selection_bias"] = x
    elif key == "shared_expert_gate":
      own["shared_gate/kernel"] = x.T
    else:
      part = key.removeprefix("shared.").removesuffix("_proj")
      assert part in ("gate", "up", "down"), key
      own[f"shared_experts/{part}/kernel"] = x.T
  return own


def layer(name):
  family, cls, fields = CASES[name]
  torch.manual_seed(list(CASES).index(name))
  config = transformers.AutoConfig.for_model(family, **SIZES, **fields)
  block = getattr(module(family), cls)(config).float()
  for key, x in [*block.named_parameters(), *block.named_buffers()]:
    # Scores with a bias may be negative, also those of the best group.
    torch.nn.init.normal_(x, -1.0 if "e_score" in key else 0.0, 0.7)
  x = torch.randn(2, 12, D, requires_grad=True)
  y = block(x)
  y = y[0] if isinstance(y, tuple) else y
  torch.sin(y).sum().backward()
  result = {"x": x, "y": y, "x_grad": x.grad}
  result = {key: value.detach().numpy() for key, value in result.items()}
  state = dict(block.named_parameters()) | dict(block.named_buffers())
  grads = {key: p.grad for key, p in block.named_parameters()}
  for part, values in (("weights", state), ("grads", grads)):
    result |= {f"{part}/{k}": x for k, x in ours(name, values).items()}
  return {f"{name}/{key}": value for key, value in result.items()}


def auxiliary_loss():
  torch.manual_seed(9)
  logits = torch.randn(3, 2, 12, E)
  real = (torch.rand(2, 12) < 0.7).float()
  loss = module("mixtral").load_balancing_loss_func(
    tuple(logits.reshape(3, -1, E)), E, J, real
  )
  arrays = {"logits": logits, "real": real, "loss": loss}
  return {f"auxiliary/{name}": x.numpy() for name, x in arrays.items()}


def main():
  arrays = auxiliary_loss()
  for name in CASES:
    arrays |= layer(name)
  path = pathlib.Path(__file__).parent / "hf_moe.npz"
  np.savez_compressed(path, **arrays)


if __name__ == "__main__":
  main()
