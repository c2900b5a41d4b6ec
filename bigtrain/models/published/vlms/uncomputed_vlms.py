"""Families of transformers that read pictures and are not computed, and why."""

from collections.abc import Mapping

_QUERIES = "learned queries between tower and decoder (a Q-Former)"
_CODES = "pictures as codes of a VQ-VAE"
_SAM = "SAM's image tower, with windows and relative positions"
_GLM = "a tower that joins its last features by a convolution"
_TWO_PARTS = (
  "an encoder for pictures or texts, and a decoder that attends to it"
)
_CROSS = "layers of the decoder that attend to pictures"
_SPARSE = "attention to positions that an indexer chooses"
_SOUNDS = "towers for sounds and videos"
_RELATIVE = "logits of relative positions"
_VIDEOS = "a tower for videos"

# {model_type of config.json: the part that the model would need}.
MISSING_PARTS: Mapping[str, str] = {
  "aria": "a projector of learned queries that attend to patches",
  "blip": _TWO_PARTS,
  "blip-2": _QUERIES,
  "chameleon": _CODES,
  "cohere_compass": "Cohere's layers with positions in three axes",
  "cosmos3_edge": "a tower of SigLIP 2 that joins patches",
  "cosmos3_omni": "a table of its arrays, beside those of a generator",
  "deepseek_ocr2": _SAM,
  "deepseek_vl_hybrid": _SAM,
  "diffusion_gemma": "a decoder that denoises blocks of tokens",
  "dots3_note": _SPARSE,
  "emu3": _CODES,
  "ernie4_5_vl_moe": "experts for the tokens of pictures alone",
  "evolla": "an encoder of proteins",
  "fast_vlm": "a tower of convolutions (FastViT)",
  "florence2": _TWO_PARTS,
  "fuyu": "patches that the decoder reads without a tower",
  "gemma3n": "several streams of the residual (AltUp)",
  "gemma4_unified": "patches that the decoder reads without a tower",
  "git": "norms after the sum of a branch and the stream",
  "glm46v": _GLM,
  "glm4v": _GLM,
  "glm4v_moe": _GLM,
  "glm5_next": _SPARSE,
  "glm_ocr": _GLM,
  "glmga": _GLM,
  "got_ocr2": _SAM,
  "granite4_vision": _QUERIES,
  "granite_docling": "several connectors between which a router chooses",
  "hunyuan_vl": "a projector of convolutions and positions in four axes",
  "hyperclovax_vision_v2": "a second projector behind Qwen2.5-VL's tower",
  "idefics": _CROSS,
  "idefics2": "a resampler of learned queries (Perceiver)",
  "inkling2": _RELATIVE,
  "inkling_mm_model": _RELATIVE,
  "instructblip": _QUERIES,
  "instructblipvideo": _QUERIES,
  "janus": _CODES,
  "kimi_k25": "the tower MoonViT",
  "kosmos-2": "a projector of learned queries that attend to patches",
  "kosmos-2.5": "a projector of learned queries that attend to patches",
  "lfm2_vl": "a tower of SigLIP 2 that joins patches",
  "lfm3_vl": "a tower with short convolutions",
  "llama4": "a tower with rotary positions in two axes and a class token",
  "llava_next_video": _VIDEOS,
  "minicpm_ocr": "a tower that joins patches between its layers",
  "minicpmv4_6": "a tower that joins patches between its layers",
  "minicpmv4_7": "a tower that joins patches between its layers",
  "minimax_m3_vl": _SPARSE,
  "mistral_large4": _SPARSE,
  "mllama": _CROSS,
  "molmo2": "a projector that attends to squares of patches",
  "muse_glimmer": "a tower with rotary positions in two axes",
  "muse_spark": _SOUNDS,
  "nemotron_h_omni": "layers of Mamba, a recurrence with a diagonal state",
  "ovis2": "embeddings that probabilities of visual words weight",
  "paddleocr_vl": "SigLIP's tower with rotary positions in two axes",
  "perception_lm": "the tower Perception Encoder",
  "pi0": "an expert for the actions of a robot",
  "pix2struct": _TWO_PARTS,
  "pp_chart2table": _SAM,
  "pp_formulanet": _TWO_PARTS,
  "qianfan_ocr": "a table of its arrays, which have names of their own",
  "qwen2_5_omni": _SOUNDS,
  "qwen2_5_omni_thinker": _SOUNDS,
  "qwen2_audio": _SOUNDS,
  "qwen3_omni_moe": _SOUNDS,
  "qwen3_omni_moe_thinker": _SOUNDS,
  "qwen4_exp": _SPARSE,
  "shieldgemma2": "a head for two words",
  "step3p7": "a tower with rotary positions in two axes",
  "t5gemma2": _TWO_PARTS,
  "udop": _TWO_PARTS,
  "unlimited_ocr": _SAM,
  "video_llama_3": "SigLIP's tower with rotary positions in two axes",
  "video_llava": _VIDEOS,
  "vision-encoder-decoder": _TWO_PARTS,
}
