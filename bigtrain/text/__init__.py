"""Text as tokens: tokenizers, chat templates, and decoding.

Open tokenizers.py first: the interface of all tokenizers. chat.py writes
conversations as text, using the templates of published models
(chat_templates/), and messages.py finds the form of a message that a template
writes in full. decoding.py has greedy search, beam search and sampling, and
speculation.py greedy search with drafts. Data, preprocessing, models, tasks,
inference and tools import this package.
"""
