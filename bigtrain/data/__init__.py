"""Data sources; a config names one by its module, such as type="tokens".

Each module has a class Source; open arrays.py first. A source has a length and
`spec`, {feature: (dtype or bytes, shape of an example, None for sizes that
vary)}. `read` returns the features of examples [B, ...], objects where sizes
vary; `where` the file and position of an example, for messages; `fingerprint` a
digest of the data and the options that select it.

Optional, each by feature: `ids`, the class numbers of all examples;
`class_names`; `vocab_sizes`, the largest id + 1. Also optional: `tokenizer`,
the name and fingerprint of the one that made the tokens; `fingerprints`, those
of files that a resumed run refuses if they have changed, by path; and the
static method `read_class_names`, which takes the arguments of Source and
returns `class_names` without reading examples.

formats/ reads files. Sources import formats, bigtrain.files and bigtrain.pp.
"""
