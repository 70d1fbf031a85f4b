"""Text and conversations to tokens.

tokenizers.py             text to token ids: any ``tokenizer.json``, or bytes
conversations.py          a row of a data set to a `Conversation`: messages, ShareGPT, Alpaca, prompt and completion;
                          the texts around a turn, for widely used models
chat_template.py          a tokenizer's own chat template: found, rendered by jinja2; where its messages are
turns.py                  which characters of the rendered text are trained
conversation_encoder.py   `ConversationEncoder`: conversations to tokens and spans; limits their length
"""
