"""``megaresume completion SHELL``: prints a script for bash or zsh to complete commands, flags and their values.

It is generated from the commands' parsers. In ``~/.bashrc``: ``eval "$(megaresume completion bash)"``; for zsh, in
``~/.zshrc`` after ``compinit``, the same with ``zsh``.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Iterator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")
    parser.epilog = 'bash: eval "$(megaresume completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc, after compinit'


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from megaresume.program import COMMANDS

    parsers = {name: _parser(name) for name in COMMANDS}
    print(_bash(parsers) if args.shell == "bash" else _zsh(parsers, COMMANDS))
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    """The parser of a command; empty for `run`, whose flags are the script's."""
    from megaresume.program import module_of

    parser = argparse.ArgumentParser(prog=f"megaresume {name}")
    if name != "run":
        importlib.import_module(module_of(name)).add_arguments(parser)
    return parser


def _flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield from ((flag, action) for flag in action.option_strings if flag.startswith("--"))


def _positional_choices(parser: argparse.ArgumentParser) -> list[str]:
    choices = [action.choices for action in parser._actions if not action.option_strings and action.choices]
    return [str(choice) for some in choices for choice in some or ()]


def _bash(parsers: dict[str, argparse.ArgumentParser]) -> str:
    names = " ".join(parsers)
    flags, values = [], []
    for name, parser in parsers.items():
        words = " ".join(flag for flag, _ in _flags(parser))
        flags.append(f'    {name}) flags="{words}"; values="{" ".join(_positional_choices(parser))}" ;;')
        for flag, action in _flags(parser):
            if action.choices:
                values.append(f'    "{name} {flag}") flags=; values="{" ".join(map(str, action.choices))}" ;;')
    return f"""\
_megaresume() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} command=${{COMP_WORDS[1]}}
  local flags= values=
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "{names} --help --version" -- "$word"))
    return
  fi
  case $command in
{chr(10).join(flags)}
  esac
  case "$command $before" in
{chr(10).join(values)}
  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  elif [[ -n $values ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _megaresume megaresume"""


def _zsh(parsers: dict[str, argparse.ArgumentParser], helps: dict[str, str]) -> str:
    commands = "\n".join(f"    {shlex.quote(f'{name}:{helps[name]}')}" for name in parsers)
    cases = []
    for name, parser in parsers.items():
        specs = [_zsh_flag(flag, action) for flag, action in _flags(parser)]
        choices = _positional_choices(parser)
        specs.append(shlex.quote(f"*: :({' '.join(choices)})" if choices else "*: :_files"))
        cases.append(f"    {name}) _arguments {' '.join(specs)} ;;")
    return f"""\
_megaresume() {{
  local -a commands=(
{commands}
  )
  if ((CURRENT == 2)); then
    _describe command commands
    return
  fi
  shift words
  ((CURRENT--))
  case $words[1] in
{chr(10).join(cases)}
  esac
}}
compdef _megaresume megaresume"""


def _zsh_flag(flag: str, action: argparse.Action) -> str:
    """A specification for _arguments: the flag, its help, and its possible values."""
    help_text = (action.help or "").partition("%")[0]
    for character in "[]:":
        help_text = help_text.replace(character, " ")
    spec = f"{flag}[{' '.join(help_text.split())}]"
    if action.nargs != 0:
        spec += f":{action.dest}:" + (f"({' '.join(map(str, action.choices))})" if action.choices else "_files")
    return shlex.quote(spec)
