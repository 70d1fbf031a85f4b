"""Text and conversations to tokens.

tokenizers.py             text to token ids: any ``tokenizer.json``, or bytes
conversations.py          a row of a data set to a `Conversation`: messages, ShareGPT's, Alpaca's, prompt and completion
chat_styles.py            what stands around a turn, for models that many train; used by templates of images, too
chat_template.py          a tokenizer's own chat template: found, and rendered by jinja2
turns.py                  which characters of the rendered text are trained; marks.py finds what messages say in it
conversation_encoder.py   `ConversationEncoder`: conversations to tokens and spans; those that are too long
"""
