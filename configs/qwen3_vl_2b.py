"""Fine-tunes Qwen3-VL 2B, or a larger one, on questions about pictures.

Command: python -m bigtrain.main --workdir=runs/qwen3_vl_2b \
  --config=configs/qwen3_vl_2b.py:init=models/Qwen3-VL-2B-Instruct,data=rows.jsonl
Hardware: 8 accelerators with 80 GB.
Result: none of our own; the report has the results of the released models.
Source: sizes of Qwen/Qwen3-VL-2B-Instruct, -4B and -8B (config.json), of 2.13,
4.44 and 8.77 billion parameters; report arxiv.org/abs/2511.21631. The learning
rates are our choice.
"""

import ml_collections

from configs import common

# Options of the tower and of the decoder.
SIZES = {
  "2b": (
    dict(width=1024, depth=24, mlp_dim=4096, taps=(5, 11, 17)),
    dict(width=2048, depth=28, num_heads=16, mlp_dim=6144, tied_head=True),
  ),
  "4b": (
    dict(width=1024, depth=24, mlp_dim=4096, taps=(5, 11, 17)),
    dict(width=2560, depth=36, num_heads=32, mlp_dim=9728, tied_head=True),
  ),
  "8b": (
    dict(width=1152, depth=27, mlp_dim=4304, taps=(8, 16, 24)),
    dict(width=4096, depth=36, num_heads=32, mlp_dim=12288, tied_head=False),
  ),
  "mu": (  # For tests.
    dict(width=32, depth=3, mlp_dim=64, taps=(0, 1)),
    dict(width=32, depth=2, num_heads=2, mlp_dim=64, tied_head=True),
  ),
}


def model_of(size):
  image, text = SIZES[size]
  tiny = size == "mu"
  return dict(
    image_model="native_vit",
    image=dict(
      num_heads=16 if not tiny else 2,
      patch_size=16 if not tiny else 2,
      posemb_grid=(48, 48) if not tiny else (3, 3),
      **image,
    ),
    text=dict(
      variant="llama",
      vocab_size=151_936 if not tiny else 260,
      max_len=262_144,
      num_kv_heads=8 if not tiny else 2,
      head_dim=128 if not tiny else 16,
      norm_eps=1e-6,
      qk_norm="head",
      rope_theta=5e6,
      rope_axes=dict(
        sections=(24, 20, 20) if not tiny else (4, 2, 2), interleaved=True
      ),
      **text,
    ),
    projector=dict(
      merge=2,
      norm="layernorm",
      norm_eps=1e-6,
      norm_patches=True,
      mlp="gelu_erf",
      hidden=4 * image["width"],
    ),
    image_token=151_655 if not tiny else 259,
    scan=True,
    remat_policy="nothing_saveable",
    dtype="bfloat16" if not tiny else "float32",
  )


def get_config(arg=None):
  """Arguments: init (the model's folder), data, size, length, runlocal.

  `data` is a .jsonl or .parquet file of rows with pictures, see
  docs/vision_language.md; the last hundredth of it is for evaluation. Without
  it, the rows are questions on handwritten digits, byte by byte. `size` is
  "2b", "4b" or "8b".
  """
  arg = common.parse_arg(
    arg, init="", data="", size="2b", length=4096, runlocal=False
  )
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.mesh = dict(replica=1, fsdp=-1)
  if arg.runlocal:
    config.total_steps, config.log_steps, config.ckpt_steps = 4, 2, 2
  else:
    config.total_epochs = 2.0
    config.log_steps, config.ckpt_steps = 10, 200

  config.model_name = "vision_language"
  config.model = model_of(arg.size if not arg.runlocal else "mu")
  if arg.init:
    config.model_init = arg.init

  def rows(train):
    if not arg.data:
      resize = "" if arg.runlocal else "resize(64)|"
      return dict(
        type="supervised",
        name="digits",
        split="train" if train else "test",
        tokenizer="bytes",
        length=48,
        pictures=dict(
          token=config.model.image_token,
          tokens=4,
          pp=f"{resize}value_range(-1, 1)",
        ),
      )
    folder = arg.init or f"models/Qwen3-VL-{arg.size.upper()}-Instruct"
    return dict(
      type="supervised",
      path=arg.data,
      slice="[:99%]" if train else "[99%:]",
      tokenizer=folder,
      # Up to 1,024 image tokens: the folder's own limit is 16,384.
      pictures=dict(published=folder, max_pixels=1024 * 32**2),
      length=arg.length,
      pack=True,
      too_long="drop",
    )

  config.task = "language_modeling"
  config.input = dict(
    data=rows(train=True), batch_size=64 if not arg.runlocal else 16
  )

  config.optimizer = dict(name="adam", b1=0.9, b2=0.95)
  config.lr = 1e-5 if arg.init else 1e-3
  # The tower changes little, so that it keeps what it knows.
  config.lr_mults = [("img/.*", 0.1)]
  config.wd = 1e-4
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_percent=5)

  config.evals = {}
  config.evals.val = dict(
    type="mean", pred="exact", data=rows(train=False), log_percent=25
  )
  return config
