"""Readers and writers of file formats, for the sources in bigtrain/data.

files.py finds files and reads them by position; open it first. row_files is the
base of sources of rows, such as JSON lines and Parquet. tfrecord, tar_files,
token_files, documents and arrow_columns know one format each, and token_writer
writes token files. windows cuts token ids into windows of a fixed length,
packing puts several documents into a window, and splits parses "train[:99%]".
row_encoder and token_rows make and keep the token ids of prompts and answers;
pydoc_questions and arithmetic are such data that need no file; reward_worker
judges a model's answers. Sources, the input pipeline and tools may import these
modules; no config can name them.
"""
