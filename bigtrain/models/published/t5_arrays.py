"""Tables of T5's arrays: names of transformers, T5X and Mesh TensorFlow."""

from bigtrain.models.published.tables import (
  Table,
  linear,
  plain,
  table,
  transposed,
  within,
)

_QKVO = table(
  linear("q", "query"),
  linear("k", "key"),
  linear("v", "value"),
  linear("o", "out"),
)


def _transformers(encoder_mlp: Table, decoder_mlp: Table) -> Table:
  """transformers' names, with those in the layers of MLPs.

  A block's layers are numbered: attention and MLP in the encoder; attention,
  cross-attention and MLP in the decoder.
  """
  return table(
    plain("shared.weight", "token_embedding"),
    plain(
      "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
      "encoder/relative_bias/embedding",
    ),
    within(
      "encoder.block.{i}.",
      "encoder/blocks/",
      plain("layer.0.layer_norm.weight", "attention_norm/scale"),
      within("layer.0.SelfAttention.", "attention/", _QKVO),
      plain("layer.1.layer_norm.weight", "mlp_norm/scale"),
    ),
    plain("encoder.final_layer_norm.weight", "encoder/norm/scale"),
    plain(
      "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
      "decoder/relative_bias/embedding",
    ),
    within(
      "decoder.block.{i}.",
      "decoder/blocks/",
      plain("layer.0.layer_norm.weight", "attention_norm/scale"),
      within("layer.0.SelfAttention.", "attention/", _QKVO),
      plain("layer.1.layer_norm.weight", "cross_attention_norm/scale"),
      within("layer.1.EncDecAttention.", "cross_attention/", _QKVO),
      plain("layer.2.layer_norm.weight", "mlp_norm/scale"),
    ),
    plain("decoder.final_layer_norm.weight", "decoder/norm/scale"),
    linear("lm_head", "head"),
    within("encoder.block.{i}.layer.1.", "encoder/blocks/", encoder_mlp),
    within("decoder.block.{i}.layer.2.", "decoder/blocks/", decoder_mlp),
  )


_MLP = within(
  "DenseReluDense.", "mlp/", linear("wi", "up"), linear("wo", "down")
)
_GATED_MLP = within(
  "DenseReluDense.",
  "mlp/",
  linear("wi_0", "gate"),
  linear("wi_1", "up"),
  linear("wo", "down"),
)
_SWITCH_MLP = table(
  linear("mlp.wi", "mlp/up"),
  linear("mlp.wo", "mlp/down"),
  linear("mlp.router.classifier", "moe/router"),
  linear("mlp.experts.expert_{e}.wi", "moe/up"),
  linear("mlp.experts.expert_{e}.wo", "moe/down"),
)
T5 = _transformers(_MLP, _MLP)
T5_1_1 = _transformers(_GATED_MLP, _GATED_MLP)
SWITCH = _transformers(_SWITCH_MLP, _SWITCH_MLP)

_T5X_ATTENTION = table(
  plain("query/kernel", "query/kernel"),
  plain("key/kernel", "key/kernel"),
  plain("value/kernel", "value/kernel"),
  plain("out/kernel", "out/kernel"),
)


def _t5x(mlp: Table) -> Table:
  """T5X's names, of google-research/t5x, examples/t5/network.py.

  It has heads and their width in one axis, and the relative biases as (heads,
  buckets).
  """
  return table(
    plain("token_embedder/embedding", "token_embedding"),
    plain("decoder/logits_dense/kernel", "head/kernel"),
    plain("encoder/encoder_norm/scale", "encoder/norm/scale"),
    transposed(
      "encoder/relpos_bias/rel_embedding", "encoder/relative_bias/embedding"
    ),
    within(
      "encoder/layers_{i}/",
      "encoder/blocks/",
      plain("pre_attention_layer_norm/scale", "attention_norm/scale"),
      within("attention/", "attention/", _T5X_ATTENTION),
      plain("pre_mlp_layer_norm/scale", "mlp_norm/scale"),
      plain("mlp/wo/kernel", "mlp/down/kernel"),
      mlp,
    ),
    plain("decoder/decoder_norm/scale", "decoder/norm/scale"),
    transposed(
      "decoder/relpos_bias/rel_embedding", "decoder/relative_bias/embedding"
    ),
    within(
      "decoder/layers_{i}/",
      "decoder/blocks/",
      plain("pre_self_attention_layer_norm/scale", "attention_norm/scale"),
      within("self_attention/", "attention/", _T5X_ATTENTION),
      plain(
        "pre_cross_attention_layer_norm/scale", "cross_attention_norm/scale"
      ),
      within("encoder_decoder_attention/", "cross_attention/", _T5X_ATTENTION),
      plain("pre_mlp_layer_norm/scale", "mlp_norm/scale"),
      plain("mlp/wo/kernel", "mlp/down/kernel"),
      mlp,
    ),
  )


T5X_1_0 = _t5x(plain("mlp/wi/kernel", "mlp/up/kernel"))
T5X_1_1 = _t5x(
  table(
    plain("mlp/wi_0/kernel", "mlp/gate/kernel"),
    plain("mlp/wi_1/kernel", "mlp/up/kernel"),
  )
)

_MTF_QKVO = table(
  plain("q", "query/kernel"),
  plain("k", "key/kernel"),
  plain("v", "value/kernel"),
  plain("o", "out/kernel"),
)


def _mesh_tensorflow(mlp: Table) -> Table:
  """Mesh TensorFlow's names; its matrices are as T5X's."""
  return table(
    plain("shared/embedding", "token_embedding"),
    plain("decoder/logits/kernel", "head/kernel"),
    plain("encoder/final_layer_norm/scale", "encoder/norm/scale"),
    transposed(
      "encoder/block_000/layer_000/SelfAttention/relative_attention_bias",
      "encoder/relative_bias/embedding",
    ),
    within(
      "encoder/block_{i:03}/",
      "encoder/blocks/",
      plain("layer_000/layer_norm/scale", "attention_norm/scale"),
      within("layer_000/SelfAttention/", "attention/", _MTF_QKVO),
      plain("layer_001/layer_norm/scale", "mlp_norm/scale"),
      within("layer_001/DenseReluDense/", "mlp/", mlp),
    ),
    plain("decoder/final_layer_norm/scale", "decoder/norm/scale"),
    transposed(
      "decoder/block_000/layer_000/SelfAttention/relative_attention_bias",
      "decoder/relative_bias/embedding",
    ),
    within(
      "decoder/block_{i:03}/",
      "decoder/blocks/",
      plain("layer_000/layer_norm/scale", "attention_norm/scale"),
      within("layer_000/SelfAttention/", "attention/", _MTF_QKVO),
      plain("layer_001/layer_norm/scale", "cross_attention_norm/scale"),
      within("layer_001/EncDecAttention/", "cross_attention/", _MTF_QKVO),
      plain("layer_002/layer_norm/scale", "mlp_norm/scale"),
      within("layer_002/DenseReluDense/", "mlp/", mlp),
    ),
  )


MTF_1_0 = _mesh_tensorflow(
  table(
    plain("wi/kernel", "up/kernel"),
    plain("wo/kernel", "down/kernel"),
  )
)
MTF_1_1 = _mesh_tensorflow(
  table(
    plain("wi_0/kernel", "gate/kernel"),
    plain("wi_1/kernel", "up/kernel"),
    plain("wo/kernel", "down/kernel"),
  )
)
