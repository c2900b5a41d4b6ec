"""Text as tokens: tokenizers, chat templates, and search for the next token.

Open tokenizers.py first: the interface of all tokenizers. chat.py writes
conversations as text, by the templates of published models (chat_templates/),
and messages.py finds the form in which a template writes all of a message;
decoding.py has greedy search, beam search and sampling, and speculation.py
greedy search with drafts. Data, preprocessing,
models, tasks, inference and tools import this package.
"""
