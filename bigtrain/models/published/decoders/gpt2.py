"""GPT-2."""

from bigtrain.models.published.decoders import model_fields
from bigtrain.models.published.families import Family, Key, Rule, choice
from bigtrain.models.published.tables import conv1d, linear, norm, plain, table


def _sizes() -> Rule:
  """Sizes that follow from others; the MLP's may have a key."""
  return Rule(
    ("num_kv_heads", "head_dim", "mlp_dim"),
    {"n_inner": None},
    lambda config: {
      "num_kv_heads": config["n_head"],
      "head_dim": config["n_embd"] // config["n_head"],
      "mlp_dim": config["n_inner"] or 4 * config["n_embd"],
    },
    lambda fields: {"n_inner": fields["mlp_dim"][0]},
  )


GPT2 = Family(
  model_type="gpt2",
  architecture="GPT2LMHeadModel",
  arrays=table(
    plain("wte.weight", "token_embedding"),
    plain("wpe.weight", "pos_embedding"),
    norm("h.{i}.ln_1", "blocks/attention_norm"),
    conv1d(
      "h.{i}.attn.c_attn",
      "blocks/attention/query",
      "blocks/attention/key",
      "blocks/attention/value",
    ),
    conv1d("h.{i}.attn.c_proj", "blocks/attention/out"),
    norm("h.{i}.ln_2", "blocks/mlp_norm"),
    conv1d("h.{i}.mlp.c_fc", "blocks/mlp/up"),
    conv1d("h.{i}.mlp.c_proj", "blocks/mlp/down"),
    norm("ln_f", "norm"),
    linear("lm_head", "head"),
    linear("score", "score"),
  ),
  keys={
    "vocab_size": Key("vocab_size", 50257),
    "max_len": Key("n_positions", 1024),
    "width": Key("n_embd", 768),
    "depth": Key("n_layer", 12),
    "num_heads": Key("n_head", 12),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "tied_head": Key("tie_word_embeddings", True),
  },
  constants={"posemb": "learn", "norm": "layernorm", "use_bias": True},
  rules=(
    choice(
      "mlp",
      "activation_function",
      {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu"},
    ),
    _sizes(),
  ),
  requires={
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
  },
  harmless=(
    "n_ctx",
    "reorder_and_upcast_attn",
    "gradient_checkpointing",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
  ),
  neutral=model_fields.NEUTRAL,
  in_shapes=("vocab_size", "width", "depth", "mlp_dim", "max_len"),
  limits=("num_classes", "pool"),
  unless={"tied_head": "lm_head.weight"},
)
