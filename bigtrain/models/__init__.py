"""The models that a config can name by `model_name`.

Each module has a class `Model`, a flax module whose fields are the keys of
config.model. Most have `param_dims` (bigtrain/dims.py) and `from_published`: it
converts released parameters, by "/"-joined names, to the names and shapes of
`like`. Parameters without a match in `like` keep their name and shape, so that
the caller can list them; a `Remark` takes the place of one that cannot be made.
Open vit.py first: it is the smallest whole transformer. layers/ holds the
layers of the models, published/ the conversion of released parameters. The
program finds models by name (parts.py). Only the captioner and the text tower
import one, the ViT.
"""
