"""LLaVA 1.5 in its two stages: first the projector, then also the decoder.

Command: the projector, between a CLIP tower and a decoder that do not train,
  python -m bigtrain.main --workdir=runs/llava1 \
  --config=configs/llava.py:stage=1,data=captions.jsonl
then python -m bigtrain.main --workdir=runs/llava2 \
  --config=configs/llava.py:init=runs/llava1,data=chats.jsonl
Hardware: not known; no compiler has planned this config yet.
Result: none of our own; the paper has the results on 12 benchmarks.
Source: arxiv.org/abs/2310.03744 and its code: batches of 256 at a rate of 1e-3,
then of 128 at 2e-5, an epoch each, AdamW without decay, 3% of warm-up; sizes of
openai/clip-vit-large-patch14-336 and lmsys/vicuna-7b-v1.5 (config.json).
"""

from configs import common, vlm_transfer

_TOWER = dict(
  width=1024,
  depth=24,
  num_heads=16,
  mlp_dim=4096,
  patch_size=14,
  mlp="gelu_quick",
  norm_eps=1e-5,
  use_bias=("qkv", "out", "mlp"),
  class_token=True,
  posemb_class=True,
  pre_norm=True,
  pool_type="tok",
  head_bias=False,
  feature_layer=23,
)
_RECIPE = vlm_transfer.Recipe(
  init="",
  model=dict(
    image=_TOWER,
    projector=dict(mlp="gelu_erf"),
    text=dict(
      variant="llama",
      width=4096,
      depth=32,
      num_heads=32,
      mlp_dim=11_008,
      vocab_size=32_000,
      max_len=4096,
      norm_eps=1e-5,
    ),
    image_size=336,
    image_token=32_000,
    mask="causal",
  ),
  tiny=dict(
    image=dict(
      width=16,
      depth=2,
      num_heads=2,
      mlp_dim=32,
      patch_size=5,
      feature_layer=1,
    ),
    text=dict(width=16, depth=2, num_heads=2, mlp_dim=32, vocab_size=260),
    image_size=(10, 20),
    image_token=259,
  ),
  pictures=dict(token=32_000, tokens=576, placeholder="<image>"),
  length=2048,
  prefix=False,
  batch_size=128,
  epochs=1.0,
  lr=2e-5,
  wd=0.0,
  warmup_percent=3,
  frozen="img/.*",
)


def get_config(arg=None):
  """Arguments: stage (1 or 2), init, tower, decoder, data, runlocal.

  `init` is the run of stage 1; `tower` and `decoder` are the folders with which
  stage 1 begins.
  """
  arg = common.parse_arg(
    arg,
    stage=2,
    init="runs/llava1",
    tower="models/clip-vit-large-patch14-336",
    decoder="models/vicuna-7b-v1.5",
    data="",
    runlocal=False,
  )
  if arg.stage not in (1, 2):
    raise ValueError(f"stage={arg.stage}: expected 1 or 2")
  recipe = _RECIPE
  if arg.stage == 1:
    recipe = recipe._replace(frozen="(img|llm)/.*", batch_size=256, lr=1e-3)
  config = vlm_transfer.make(recipe, arg)
  if not arg.runlocal:
    size = 336
    pp = f"resize_small({size})|central_crop({size})|value_range(-1, 1)"
    for part in (config.input, config.evals.val, config.evals.answers):
      part.data.tokenizer = arg.decoder
      part.data.pictures.pp = pp
    config.evals.answers.tokenizer = arg.decoder
    if arg.stage == 1:
      config.model_init = dict(
        parts=dict(img=arg.tower, llm=arg.decoder),
        allow_missing=["projector/.*"],
      )
  return config
