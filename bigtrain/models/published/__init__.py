"""Parameters of published models, loaded into our models and exported again.

Open decoder_families.py first: each published architecture is a table of fields
and a table of arrays. families.py compares a config.json with a model,
tables.py loads and exports arrays, and t5_families.py has the T5s, under T5X's
names too (t5x.py). blocks.py converts between stacked and separate blocks;
conversions.py restores dtypes and names, and resamples position embeddings. The
modules in bigtrain/models import this package for their `from_published`,
`to_published` and `published_fields`; a warm start shows its remarks on arrays.
"""
