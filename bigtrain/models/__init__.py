"""The models that a config can name by `model_name`.

Each module has a class `Model`, a flax module whose fields are the keys of
config.model; most have `from_published`, which converts released parameters.
Open vit.py first: it is the smallest whole transformer. layers/ holds the
layers of the models, published/ the conversion of released parameters. The
program finds models by name (parts.py). Only the captioner and the text tower
import one, the ViT.
"""
