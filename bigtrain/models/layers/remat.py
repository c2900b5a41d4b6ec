"""Rematerialisation: which results of a block the backward pass keeps.

The backward pass computes the other results again, which saves memory and costs
time.
"""

import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from jax import checkpoint_policies as policies

from bigtrain.config.errors import check_choice, check_number

# Name of the output and softmax statistics of kernels and blockwise attention.
ATTENTION = "attention"
# Name of queries, keys, values, and the results of an MLP's first products:
# products with weights whose results stay inside of an attention or an MLP.
INNER = "inner"

# Policies that this module adds to jax's.
_OURS = {
  "attention_saveable": policies.save_only_these_names(ATTENTION),
  "inner_projections_and_attention_saveable": (
    policies.save_only_these_names(ATTENTION, INNER)
  ),
  "projections_and_attention_saveable": policies.save_from_both_policies(
    policies.dots_with_no_batch_dims_saveable,
    policies.save_only_these_names(ATTENTION),
  ),
}

# "none", those of jax.checkpoint_policies without arguments, and ours.
_OF_JAX = (
  "everything_saveable",
  "nothing_saveable",
  "dots_saveable",
  "checkpoint_dots",
  "dots_with_no_batch_dims_saveable",
  "checkpoint_dots_with_no_batch_dims",
)
POLICIES = ("none", *_OF_JAX, *_OURS)

# Primitives that cost more to repeat than their results cost to keep.
_COSTLY = {
  "dot_general",
  "conv_general_dilated",
  # The comparison of dropout's random bits leaves one byte per element.
  "lt",
  # cuDNN's attention.
  "dot_product_attention_fwd",
  "dot_product_attention_fwd_wrapper",
}


def read(policy: str) -> tuple[str, int]:
  """Splits "NAME(every=K)", a policy for every K-th layer, into (NAME, K)."""
  match = re.fullmatch(r"(.*)\(every=(\d+)\)", str(policy))
  name, every = (match[1], int(match[2])) if match else (policy, 1)
  key = "config.model.remat_policy"
  check_choice(key, name, POLICIES)
  check_number(f"{key}: every", every, least=1)
  return name, every


def block_class(
  block: type[nn.Module], scan: bool, policy_name: str, *, train: int
) -> type[nn.Module]:
  """The class of a block, rematerialised by a policy.

  Args:
    scan: whether the block is the body of a loop.
    train: index of the argument `train` in the block's call; self is 0.
  """
  keeps = policy(policy_name, scan)
  if keeps is not None:
    block = nn.remat(
      block, policy=keeps, prevent_cse=not scan, static_argnums=(train,)
    )
  # Unrolled blocks are alike: with jit only one is traced. XLA inlines it.
  return block if scan else nn.jit(block, static_argnums=(train,))


def _is_costly(primitive: Any, *_: Any, **__: Any) -> bool:
  return primitive.name in _COSTLY


def policy(name: str, scan: bool) -> Callable[..., bool] | None:
  """The policy for jax.checkpoint; None where XLA decides what to keep."""
  if name in _OURS:
    return _OURS[name]
  if name == "none" and not scan:
    return None
  if name == "none":
    # A loop writes everything its backward pass needs to memory, where XLA
    # would fuse the cheap operations of unrolled layers into their users.
    policy = _is_costly
  else:
    policy = getattr(policies, name)
  if name in ("none", "dots_saveable", "checkpoint_dots"):
    # A kernel's products are not visible as such. Without its results the
    # backward pass would run it again, or keep the scores of all its blocks.
    policy = policies.save_from_both_policies(
      policy, _OURS["attention_saveable"]
    )
  return policy
