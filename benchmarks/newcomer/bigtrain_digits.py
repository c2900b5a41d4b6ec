"""python -m bigtrain.main --config=benchmarks/newcomer/bigtrain_digits.py \
--workdir=runs/newcomer"""


def get_config():
  digits = dict(type="arrays", name="digits")
  pp = "value_range(-1,1,0,16)|copy('label','labels')|keep('image','labels')"
  return dict(
    total_epochs=30,
    ckpt_epochs=1,
    task="classification",
    input=dict(data=dict(digits, split="train"), pp=pp, batch_size=128),
    model_name="vit",
    model=dict(
      **dict(num_classes=10, patch_size=2, pool_type="gap", posemb="learn"),
      **dict(width=64, depth=2, mlp_dim=128, num_heads=4),
    ),
    optimizer=dict(name="adam"),
    lr=2e-3,
    schedule=dict(decay_type="cosine", warmup_percent=10),
    evals=dict(
      val=dict(
        **dict(type="classification", pred="logits", log_epochs=1),
        **dict(data=dict(digits, split="test"), pp=pp),
      )
    ),
  )
