"""Data sources; a config names one by its module, such as type="tokens".

Each module has a class Source; open arrays.py first. A source has a length and
`spec`, {feature: (dtype or bytes, shape of an example, None for sizes that
vary)}. `read` returns the features of examples [B], with a leading axis B and
objects where sizes vary; `where` the file and position of an example, for
messages; `fingerprint` a digest of the data and the options that select it.

Some attributes are optional: `ids`, the class numbers of all examples by
feature; `class_names`, the names of these classes by feature; `vocab_sizes`,
the largest id + 1 by feature; `tokenizer`, the name and the fingerprint of the
one that made the tokens; and the static method `read_class_names`, which takes
the arguments of Source and returns `class_names` without reading examples.

formats/ holds the code that reads files. The input pipeline finds sources by
name, through bigtrain.parts; only a source that builds on another one imports
it. Sources import formats, bigtrain.files and bigtrain.pp.
"""
