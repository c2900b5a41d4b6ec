"""Families of transformers that the decoder does not compute, and why."""

from collections.abc import Mapping

_MAMBA = "layers of Mamba, a recurrence with a diagonal state"
_ALIBI = "biases of attention that grow with the distance (ALiBi)"
_SPARSE = "attention to positions that an indexer chooses"
_LINEAR = "linear attention with a decay for each head (lightning attention)"
_ENCODER = "an encoder's blocks, read from left to right"

# {model_type of config.json: the part that the decoder would need}.
MISSING_PARTS: Mapping[str, str] = {
  "axk1": "norms after the experts of some layers and not after MLPs",
  "axk2": _SPARSE,
  "bailing_hybrid": _LINEAR,
  "bamba": _MAMBA,
  "beam": "a bias of output gates for each head",
  "biogpt": "learned positions that begin at the third row of their table",
  "bitnet": "norms before the last projections of attention and MLP",
  "bloom": _ALIBI,
  "blt": "patches of bytes, with their own encoder and decoder",
  "codegen": "projections of queries, keys and values in blocks of heads",
  "cohere2_moe": "the mean of an MLP and experts beside it",
  "cpmant": "learned biases of attention by segment and distance",
  "ctrl": "sine and cosine positions, added to the embedding",
  "dbrx": "experts' arrays that are joined over experts",
  "deepseek_v32": _SPARSE,
  "deepseek_v4": _SPARSE,
  "diffllama": "the difference of two softmaxes (differential attention)",
  "doge": "a mask of attention that values determine",
  "dots3_note_text": _SPARSE,
  "falcon_h1": _MAMBA,
  "falcon_mamba": _MAMBA,
  "gemma3n": "several streams of the residual (AltUp)",
  "gemma3n_text": "several streams of the residual (AltUp)",
  "glm_moe_dsa": _SPARSE,
  "gpt_neox_japanese": "a bias only in the last projection of attention",
  "hrm_text": "stacks of layers that run several times",
  "hy_v4": _SPARSE,
  "inkling2_text": "logits of relative positions",
  "inkling_text": "logits of relative positions",
  "jamba": _MAMBA,
  "jetmoe": "experts of attention",
  "laguna": "output gates by softplus, one for each head",
  "kolibri1": "a router that adds its bias to logits, not to scores",
  "lfm3": "one output gate for each head",
  "longcat_flash": "two attentions in a layer, and experts that do nothing",
  "mamba": _MAMBA,
  "mamba2": _MAMBA,
  "mimo_v2_flash": "values of another width than keys",
  "minimax": _LINEAR,
  "modernbert-decoder": _ENCODER,
  "mpt": _ALIBI,
  "nemotron_h": _MAMBA,
  "openai-gpt": "norms after the sum of a branch and the stream",
  "opt": "learned positions that begin at the third row of their table",
  "persimmon": "layer norms of queries and keys",
  "phimoe": "a router that masks the best expert for its second choice",
  "qwen4_exp": _SPARSE,
  "qwen4_exp_text": _SPARSE,
  "recurrent_gemma": "a gated linear recurrence (RG-LRU)",
  "rwkv": "RWKV's recurrence",
  "xglm": "sine and cosine positions, added to the embedding",
  "xlstm": "the recurrence of an mLSTM",
  "zamba": _MAMBA,
  "zamba2": _MAMBA,
}
