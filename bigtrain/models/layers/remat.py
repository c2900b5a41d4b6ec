"""Rematerialisation: which results of a block the backward pass keeps."""

import re
from collections.abc import Callable

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
  "everything_saveable nothing_saveable dots_saveable checkpoint_dots "
  "dots_with_no_batch_dims_saveable checkpoint_dots_with_no_batch_dims"
).split()
POLICIES = ("none", *_OF_JAX, *_OURS)

# Operations that cost more to repeat than their results cost to keep: matrix
# products, cuDNN's attention, and dropout's random bits ("lt"), whose
# comparison leaves one byte per element.
_COSTLY = {"dot_general", "conv_general_dilated", "lt"}
_COSTLY |= {"dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"}


def read(policy: str) -> tuple[str, int]:
  """Splits "NAME(every=K)", the policy of every K-th layer, into both."""
  match = re.fullmatch(r"(.*)\(every=(\d+)\)", str(policy))
  name, every = (match[1], int(match[2])) if match else (policy, 1)
  key = "config.model.remat_policy"
  check_choice(key, name, POLICIES)
  check_number(f"{key}: every", every, least=1)
  return name, every


def block_class(
  block: type[nn.Module], scan: bool, policy_name: str, *, train: int
) -> type[nn.Module]:
  """`train` is the index of that argument in the block's call; self is 0."""
  keeps = policy(policy_name, scan)
  if keeps is not None:
    block = nn.remat(
      block, policy=keeps, prevent_cse=not scan, static_argnums=(train,)
    )
  # Unrolled blocks are alike: it suffices to trace one. XLA gets the same.
  return block if scan else nn.jit(block, static_argnums=(train,))


def policy(name: str, scan: bool) -> Callable[..., bool] | None:
  if name in _OURS:
    return _OURS[name]
  if name == "none" and not scan:
    return None
  if name == "none":
    # A loop writes everything its backward pass needs to memory, where XLA
    # would fuse the cheap operations of unrolled layers into their users.
    policy = lambda prim, *_, **__: prim.name in _COSTLY
  else:
    policy = getattr(policies, name)
  if name in ("none", "dots_saveable", "checkpoint_dots"):
    # A kernel's products are not visible as such. Without its results the
    # backward pass would run it again, or keep the scores of all its blocks.
    policy = policies.save_from_both_policies(
      policy, _OURS["attention_saveable"]
    )
  return policy
