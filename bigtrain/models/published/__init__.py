"""Parameters of published models, loaded into our models and exported again.

Open layouts.py first: tables map the arrays of a published layout to our
parameters, in both directions. decoder.py and t5.py hold the tables of the
models of the same name, and t5x.py the names of T5X; decoder_config.py and
t5_config.py read and write their config.json. blocks.py converts between
stacked and separate blocks; arrays.py restores dtypes and names, and resamples
position embeddings. The modules in bigtrain/models import this package for
their `from_published`, `to_published` and `published_fields`; a warm start
shows its remarks on arrays.
"""
