"""SigLIP 2 B/16: sigmoid loss, LocCa's decoder, and late self-distillation.

Command: python -m bigtrain.main --workdir=runs/siglip2 \\
  --config=configs/siglip2.py:tokenizer=FILE
  and, on pairs of scikit-learn's digits, within an hour on two busy CPU cores:
  python -m bigtrain.main --config=configs/siglip2.py:runlocal \\
    --workdir=runs/siglip2
Hardware: the authors had up to 2,048 TPU v5e. Our guess: 256 are enough.
Result: not measured. Published, with WebLI, which is not public: 79.1%
zero-shot accuracy on ImageNet of B/16 at 256 pixels, 82.5% of L/16. On COCO
this config makes 480,000 epochs, which only shows that everything works. The
run on digits, after 1,000 steps: 0.325 zero-shot accuracy over the 100 ordered
pairs (zeroshot/acc), a mean overlap of boxes of 0.69 (boxes/iou).
Source: Tschannen et al. 2025, "SigLIP 2", arxiv.org/abs/2502.14786. Published:
the towers, attention pooling in both, texts of 64 lower-case tokens of Gemma's
tokenizer; batch, number of examples, Adam, learning rate, decay, clipping,
warm-up; equal weights of both losses from the start; a decoder with half of the
text tower's layers; half of the captions predicted in parallel; from 80% on one
global and 8 local crops, half of the patches masked, weights 1 and 0.25, both
times 0.25 for B (0.5 for L, 1 for So400m, 0.5 for g). A second summary of the
paper that we have gives the masked patches a weight of 2.5 in place of 0.25;
which of the two it prints is not checked: patch_weight has it.
Our guesses: temperatures, prototypes and heads (those of DINO, arXiv
2104.14294), Sinkhorn, sizes and areas of the crops, momentum of the teacher;
that each image has all three sequences of LocCa (arXiv 2403.19596), with a loss
on text and box; 1,024 locations, as PaliGemma; Adam's beta2 and its moment in
bfloat16; initial temperature and bias, as SigLIP (arXiv 2303.15343).
Instead of WebLI's boxes with phrases there are COCO's, with names of classes.
B/16 and B/32 go on in siglip2_distill.py, on data that a So400m chooses.

NaFlex goes on from it: siglip2_naflex.py. Needs coco_captions, prepared by
tensorflow-datasets, and Gemma's tokenizer (256,000 ids); without one, texts are
cut to 64 bytes. The zero-shot evaluation needs imagenet2012 and
class_names=FILE, a text file with one class name per line.
"""

import ml_collections

from configs import common

# Factor of both losses of self-distillation, by the size of the image tower.
DISTILL = {"B": 0.25, "L": 0.5, "So400m": 1.0, "g": 0.5}

# Classes of COCO's objects, by their number in tensorflow-datasets.
CLASSES = (
  """person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic
light,fire hydrant,stop sign,parking meter,bench,bird,cat,dog,horse,sheep,cow,
elephant,bear,zebra,giraffe,backpack,umbrella,handbag,tie,suitcase,frisbee,skis,
snowboard,sports ball,kite,baseball bat,baseball glove,skateboard,surfboard,
tennis racket,bottle,wine glass,cup,fork,knife,spoon,bowl,banana,apple,sandwich,
orange,broccoli,carrot,hot dog,pizza,donut,cake,chair,couch,potted plant,bed,
dining table,toilet,tv,laptop,mouse,remote,keyboard,cell phone,microwave,oven,
toaster,sink,refrigerator,book,clock,vase,scissors,teddy bear,hair drier,
toothbrush""".replace(",\n", ",")
  .replace("\n", " ")
  .split(",")
)

WORDS = "zero one two three four five six seven eight nine".split()
NOUNS = ["an eight" if word == "eight" else f"a {word}" for word in WORDS]


def get_config(arg=None):
  """The config.

  Arguments:
    variant: size of the image tower; the text tower has the same size.
    res: height and width of the images, in pixels.
    tokenizer: path of Gemma's tokenizer, or "bytes".
    class_names: path of a text file of ImageNet's class names.
    data_dir: folder of the data sets.
    runlocal: a small run; on digits without `data_dir`.
  """
  arg = common.parse_arg(
    arg,
    variant="B/16",
    res=256,
    tokenizer="bytes",
    class_names="",
    data_dir="",
    runlocal=False,
  )
  size, _, patch = arg.variant.partition("/")
  digits = arg.runlocal and not arg.data_dir
  res = arg.res if not arg.runlocal else 32
  vocab_size = 256_000 if not arg.runlocal else 259
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_examples = 40_000_000_000
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = dict(
    contrast=dict(
      type="contrastive", weight=1.0, loss=dict(kind="sigmoid", chunk=1024)
    ),
    # 1,536 tokens of a device's 384 sequences at a time: the gradient of a
    # kernel with 257,024 columns is read and written for each part of the
    # logits.
    locca=dict(type="locca", weight=1.0, loss=dict(parallel_prob=0.5, chunk=4)),
    # Its weight is that of the local crops; patch_weight is relative to it.
    distill=dict(
      type="dinov2",
      weight=DISTILL.get(size, 1.0),
      from_percent=80,
      loss=dict(
        teacher="img/.*|(class|patch)_(head|prototypes)/.*",
        num_large=1,
        num_small=8,
        large_size=res,
        small_size=96,
        large_area=(0.4, 1.0),
        small_area=(0.05, 0.4),
        flip=True,
        contrast=0.4,
        mask_prob=1.0,
        mask_ratio=(0.5, 0.5),
        centering="sinkhorn",
        teacher_temperature=0.04,
        student_temperature=0.1,
        patch_weight=0.25,
        koleo_weight=0.0,
        momentum=0.999,
      ),
    ),
  )

  # Locations follow the tokenizer's ids.
  max_len, locations = (64, 1024) if not digits else (32, 21)
  of_text = f"model={arg.tokenizer!r},max_len={max_len}"
  tokenize = f"tokenize({of_text},eos='sticky'"
  of_boxes = f"{vocab_size},{of_text},num_bins={locations}"
  image = f"decode|resize({res})|value_range(-1,1)"
  first_text = "choice(key='captions/text',key_result='text')|lower"
  if digits:
    image, first_text = "value_range(-1,1,0,16)", "lower"
  else:
    of_boxes += ",boxes='objects/bbox',box_texts='objects/label'"
    of_boxes += f",names={CLASSES!r}"

  def coco(split):
    if digits:
      which = "train" if split == "train" else "test"
      number = 200_000 if which == "train" else 1000
      return dict(
        type="digit_pairs", split=which, length=number, margin=1, boxes=True
      )
    name, data_dir = "coco_captions/2014", arg.data_dir or None
    return dict(type="tfds", name=name, split=split, data_dir=data_dir)

  def imagenet():
    if digits:
      return coco("validation")
    data_dir = arg.data_dir or None
    return dict(
      type="tfds", name="imagenet2012", split="validation", data_dir=data_dir
    )

  # No crops and no flips: they would change boxes, and "left" in a caption. The
  # views of self-distillation are made of this image on the devices.
  config.input = dict(
    data=coco("train"),
    pp=f"{image}|{first_text}|{tokenize})|locca({of_boxes})"
    "|keep('image','labels','locca','locca_masks')",
    # Of digits, any hundred consecutive examples show all hundred pairs. So no
    # batch has the same caption twice, which would count as a mismatch.
    shuffle=not digits,
    batch_size=32_768,
  )

  config.model_name = "siglip2"
  of_towers = dict(dtype="bfloat16", scan=True, remat_policy="nothing_saveable")
  config.model = dict(
    image=dict(
      variant=arg.variant,
      pool_type="map",
      posemb_grid=(res // int(patch), res // int(patch)),
      **of_towers,
    ),
    text=dict(
      variant=size, vocab_size=vocab_size, pool_type="map", **of_towers
    ),
    out_dim=(None, {"B": 768, "L": 1024, "So400m": 1152}.get(size, 768)),
    temperature_init=10.0,
    bias_init=-10.0,
    max_len=max_len,
    num_locations=locations,
    num_prototypes=65_536,
    # Of 128 patches of each image; with 65,536, each array of scores would
    # have 4.3 GB on each of 256 devices.
    patch_prototypes=8192,
    head_hidden=2048,
    head_out=256,
  )

  config.optimizer = dict(name="adam", b1=0.9, b2=0.95, mu_dtype="bfloat16")
  config.lr = 1e-3
  config.wd = 1e-4
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_steps=20_000)

  class_names = arg.class_names
  if arg.runlocal and not class_names:
    class_names = [f"{a} left of {b}" for a in NOUNS for b in NOUNS]
  several = f"lower(key='captions/text')|{tokenize},key='captions/text')"
  several = f"{several}|first_rows(5)"
  one = f"lower|{tokenize})" if digits else f"{first_text}|{tokenize})"
  config.evals = {}
  config.evals.retrieval = dict(
    type="retrieval",
    pred="embed",
    data=coco("test"),
    pp=f"{image}|{one if digits else several}|keep('image','labels')",
    num_examples=5000,
    log_steps=10_000,
    batch_size=1024,
  )
  config.evals.zeroshot = dict(
    enabled=bool(class_names),
    type="zeroshot",
    pred="embed",
    data=imagenet(),
    pp=f"{image}|keep('image','label')",
    pp_text=f"lower|{tokenize})",
    class_names=class_names,
    prompts=["{}", "a photo of a {}"],
    log_steps=10_000,
    batch_size=1024,
    cache=False,
  )
  config.evals.captions = dict(
    type="captions",
    pred="answer",
    data=coco("val"),
    pp=f"{image}|{one}|locca_question({vocab_size},'cap',{of_text},"
    f"num_bins={locations})|keep('image','labels','prompt')",
    tokenizer=arg.tokenizer,
    num_examples=1000,
    log_steps=10_000,
    batch_size=1024,
  )
  config.evals.boxes = dict(
    type="box_overlap",
    pred="box",
    data=coco("val"),
    pp=f"{image}|locca_question({of_boxes},task='aref')"
    "|keep('image','prompt','box')",
    num_examples=1000,
    log_steps=10_000,
    batch_size=1024,
  )
  if arg.runlocal:
    _small(config, digits)
  return config


def _small(config, digits):
  """Changes a config for two CPU cores."""
  del config.total_examples
  config.total_steps = 1000 if digits else 5
  config.log_steps = 50 if digits else 1
  config.ckpt_steps = 250
  config.input.batch_size = 96 if digits else 16
  config.lr = 3e-3
  config.schedule.warmup_steps = 80 if digits else 1
  config.task.locca.loss.chunk = 0  # All logits fit.
  of_towers = dict(
    variant="mu", dtype="float32", scan=False, remat_policy="none"
  )
  config.model.text.update(of_towers)
  config.model.image.update(of_towers, variant="mu/16", posemb_grid=(2, 2))
  config.model.update(
    out_dim=(None, 32),
    bias_init=-5.0,
    num_prototypes=64,
    patch_prototypes=64,
    head_hidden=64,
    head_out=32,
  )
  # Local crops need pictures of several patches.
  config.task.distill.loss.update(
    num_small=2,
    large_size=32,
    small_size=16,
    flip=False,
    contrast=0.2,
    momentum=0.98,
  )
  for evaluation in config.evals.values():
    evaluation.batch_size = 128 if digits else 16
  config.evals.captions.num_examples = 16
  config.evals.zeroshot.prompts = ["{}"]
  if digits:
    sizes = dict(width=64, mlp_dim=128, num_heads=4)
    config.model.image.update(
      variant="mu/2", depth=3, posemb_grid=(5, 10), **sizes
    )
    config.model.text.update(depth=1, **sizes)
    config.model.out_dim = (None, 64)
    config.task.distill.loss.update(
      large_size=10,
      small_size=6,
      large_area=(0.7, 1.0),
      small_area=(0.2, 0.4),
    )
    for evaluation in config.evals.values():
      evaluation.log_steps = 200
    config.evals.retrieval.num_examples = 100
    config.evals.captions.num_examples = 500
    config.evals.boxes.num_examples = 500
