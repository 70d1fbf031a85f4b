"""Conversations to tokens, and to spans that say which of them are trained.

rows.py      a row of a data set to a `Conversation`: messages, ShareGPT's, Alpaca's, prompt and completion
template.py  a tokenizer's own chat template: found, and rendered by jinja2
turns.py     which characters of the rendered text are trained; marks.py finds what messages say in it
encode.py    `ConversationEncoder`: conversations to tokens and spans; those that are too long
"""
