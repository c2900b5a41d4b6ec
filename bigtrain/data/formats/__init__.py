"""Readers and writers of file formats, for the sources in bigtrain/data.

files.py finds files and reads them by position; open it first. row_files is the
base of sources whose files have rows, such as JSON lines and Parquet. tfrecord,
tar_files, token_files, documents and arrow_columns know one format each, and
token_writer writes token files. windows cuts token ids into windows of a fixed
length, packing puts several documents into a window, and splits parses
"train[:99%]". row_encoder makes the token ids of prompts and answers, and
token_rows keeps them. pydoc_questions and arithmetic make prompts and answers
without any file. judges and reward_worker judge a model's answers. Sources, the
input pipeline and tools may import these modules; a config cannot name them.
"""
