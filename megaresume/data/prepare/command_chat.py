"""``megaresume prepare --chat``: flags to what is said of conversations."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megaresume.command_line import given_of, names_of
from megaresume.encoding.text.conversations import STYLES
from megaresume.stream.errors import UsageError

if TYPE_CHECKING:
    from megaresume.data.prepare.chat import ChatOptions


def add_chat_arguments(parser: argparse.ArgumentParser) -> list[str]:
    """Flags that hold for conversations alone; gives their names in the namespace."""
    chat = parser.add_argument_group("conversations", "rows to tokens by the tokenizer's chat template, and .spans")
    chat.add_argument(
        "--chat", action="store_true", help="each row is a conversation; only what --train says is trained"
    )
    chat.add_argument(
        "--chat-rows",
        choices=("messages", "sharegpt", "alpaca", "prompt-completion", "preference"),
        help="shape of the rows (default: by the keys of the first one)",
    )
    chat.add_argument(
        "--chat-template",
        metavar="FILE",
        help=f"a jinja2 template in the place of the tokenizer's own, or one of {', '.join(STYLES)}",
    )
    chat.add_argument("--chat-date", metavar="YYYY-MM-DD", help="what a template that writes today's date takes for it")
    chat.add_argument(
        "--train", default="assistant", metavar="ROLE[,ROLE]", help="whose messages are trained (default: assistant)"
    )
    chat.add_argument(
        "--train-turns",
        choices=("all", "last"),
        default="all",
        help="all of these messages, or those after the last one of the user (default: all)",
    )
    chat.add_argument(
        "--train-parts",
        default="text,thinking,tool-calls",
        metavar="PART[,PART]",
        help="of the assistant's messages (default: text,thinking,tool-calls)",
    )
    chat.add_argument("--any-role-order", action="store_true", help="take roles in any order that the template takes")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="tokens of a conversation (default: any number)")
    chat.add_argument(
        "--too-long",
        choices=("error", "turn", "cut", "skip"),
        help="conversations longer than --max-tokens: stop, end them after an answer that fits, cut them, or leave "
        "them out (default: stop)",
    )
    return names_of(chat)


def chat_options(args: argparse.Namespace) -> ChatOptions | None:
    """What the flags say of conversations; None if rows are none.

    Raises:
        UsageError: a flag of conversations without --chat, or a bad value.
    """
    from megaresume.data.prepare.chat import ChatOptions
    from megaresume.encoding.text.chat_template import PARTS
    from megaresume.encoding.text.turns import Selection

    if not args.chat:
        if given := given_of(args, args.chat_only):
            raise UsageError(
                f"{given[0]} goes with --chat",
                found=f"{given[0]} without --chat",
                expected="--chat, if each row is a conversation",
                action="add --chat, or leave it out",
            )
        return None
    roles, parts = (tuple(filter(None, words.split(","))) for words in (args.train, args.train_parts))
    if not roles or not parts or not set(parts) <= set(PARTS):
        raise UsageError(
            "bad --train or --train-parts",
            found=f"--train {args.train} --train-parts {args.train_parts}",
            expected=f"roles such as assistant,tool; and some of {','.join(PARTS)}",
            action="correct it",
        )
    return ChatOptions(
        template=args.chat_template,
        date=args.chat_date,
        shape=args.chat_rows,
        selection=Selection(roles=roles, turns=args.train_turns, parts=tuple(part for part in PARTS if part in parts)),
        any_order=args.any_role_order,
        max_tokens=args.max_tokens,
        too_long=args.too_long or "error",
    )
