"""`ballast completion SHELL`: prints the script that makes the shell complete commands and flags."""

import argparse

from tools.cli.arguments import Commands

_SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "completion",
        help="print the completion script of a shell",
        description='For bash: eval "$(ballast completion bash)", best in ~/.bashrc.',
    )
    parser.set_defaults(run=run)
    parser.add_argument("shell", choices=_SHELLS, help="which one")


def run(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["ballast"], shell=args.shell))
    return 0
