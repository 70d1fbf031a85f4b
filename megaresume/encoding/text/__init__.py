"""Text and conversations to tokens.

tokenizers.py             text to token ids: any ``tokenizer.json``, or bytes
conversations.py          a row of a data set to a `Conversation`: messages, ShareGPT's, Alpaca's, prompt and
                          completion; what stands around a turn, for models that many train
chat_template.py          a tokenizer's own chat template: found, rendered by jinja2; where messages are in it
turns.py                  which characters of the rendered text are trained
conversation_encoder.py   `ConversationEncoder`: conversations to tokens and spans; those that are too long
"""
