"""CLIPPO: one ViT for images and for texts, which are drawn as pictures.

Command: python -m bigtrain.main --workdir=runs/clippo \
  --config=configs/clippo.py --config.microbatches=4
Hardware: 16 accelerators with 80 GB, for a batch of 8,192 pairs.
Result: published, on LAION-400M with this batch and 100,000 steps: 51.5%
zero-shot accuracy on ImageNet, and 53.6% with a batch of 10,240; on YFCC-100M
from a ViT of ImageNet-21k: 47.4%, and 44.7% by ten shots. Not measured here:
this config makes many epochs of COCO, which only shows that everything works.
Source: Tschannen, Mustafa and Houlsby 2022, "CLIPPO: Image-and-Language
Understanding from Pixels Only", arxiv.org/abs/2212.08045, and train_clippo.py
of big_vision.

The font is GNU Unifont, `apt-get install unifont`; the published models read
version 9.0.06. Needs coco_captions, prepared by tensorflow-datasets; and for
the zero-shot evaluation imagenet2012 and class_names=FILE.
"""

from configs import common, siglip


def get_config(arg=None):
  """Input and evaluations are SigLIP's, with pictures in place of tokens.

  Arguments:
    variant: size of the tower.
    res: height and width of images and of pictures of text, in pixels.
    font: path of unifont.hex; default: Debian's, or with `runlocal` none, so
      that texts are made-up pictures.
    class_names: path of a text file of ImageNet's class names.
    data_dir: folder of the data sets.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(
    arg,
    variant="B/16",
    res=224,
    font="",
    class_names="",
    data_dir="",
    runlocal=False,
  )
  res = arg.res if not arg.runlocal else 32
  given = [f"{name}={arg[name]}" for name in ("variant", "res", "data_dir")]
  given += [f"class_names={arg.class_names}"] * bool(arg.class_names)
  given += ["runlocal"] * arg.runlocal
  config = siglip.get_config(",".join(given))
  if not arg.runlocal:
    del config.total_examples
    config.total_steps = 100_000

  font = f",font={arg.font!r}" if arg.font else ""
  made_up = arg.runlocal and not (arg.data_dir or arg.font)

  def picture(key, made_up=False):
    draw = f"render_text({res}{font},key={key!r},key_result='labels')"
    if made_up:  # The font may be missing.
      draw = f"decode(key={key!r})|resize({res},key={key!r})"
      draw += f"|copy({key!r},'labels')"
    return draw + "|value_range(-1,1,key='labels')"

  image = f"decode|resize({res})|value_range(-1,1)"
  if made_up:
    config.input.data.features["captions/text"] = "jpeg[40,40,3]"
    config.input.pp = f"{image}|{picture('captions/text', True)}"
  else:
    choice = "choice(key='captions/text',key_result='text')"
    config.input.pp = f"{image}|{choice}|{picture('text')}"
  config.input.pp += "|keep('image','labels')"
  config.input.batch_size = 8192 if not arg.runlocal else 16

  config.loss = dict(kind="softmax", chunk=1024)
  config.model = dict(
    image=config.model.image.to_dict(),
    text_model=None,
    out_dim=768 if not arg.runlocal else 32,
    temperature_init=10.0,
    bias_init=None,
  )

  config.optimizer = dict(name="big_vision_adafactor")
  config.schedule = dict(
    decay_type="rsqrt",
    timescale_steps=10_000,
    warmup_steps=10_000 if not arg.runlocal else 1,
    cooldown_steps=10_000 if not arg.runlocal else 1,
  )

  config.evals.coco = dict(
    type="mean",
    pred="loss",
    pred_kw=dict(kind="softmax"),
    data=config.evals.coco.data,
    pp=config.input.pp,
    log_steps=1000,
    batch_size=config.evals.coco.batch_size,
  )
  if made_up:
    config.evals.coco.data = config.input.data
    config.evals.imagenet.enabled = False
  config.evals.imagenet.pp_text = picture("text")
  return config
