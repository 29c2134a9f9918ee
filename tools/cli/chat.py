"""`ballast chat`: a conversation in the terminal, or with one turn per line of standard input."""

import argparse
import contextlib
import importlib
import sys
from typing import TYPE_CHECKING

from ballast.client import ChatMessage, Client
from ballast.common.errors import BallastError
from tools.cli.arguments import Commands, add_address, add_sampling, sampling_of

if TYPE_CHECKING:
    from ballast.common.sampling import SamplingParams

_HELP = "/reset clears the conversation, /system TEXT sets the system prompt, /exit (or Ctrl-D) ends"


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("chat", help="chat with the model", description=_HELP)
    parser.set_defaults(run=run)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_address(parser)
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    sampling = sampling_of(args)
    interactive = sys.stdin.isatty()
    with Client(args.address, overload_retries=args.overload_retries) as client:
        chat = Chat(client, sampling, args.priority, args.deadline_s, args.system)
        if not interactive:
            for line in sys.stdin:
                if line.strip():
                    chat.say(line.strip())
            return 0
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # gives `input` a history and line editing
        model = client.model_info()
        print(f"{model.name}, up to {model.max_model_len:,} tokens. {_HELP}.")
        _converse(chat)
    return 0


def _converse(chat: "Chat") -> None:
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line == "/exit":
            return
        try:
            if line == "/reset":
                chat.reset()
            elif line.startswith("/system "):
                chat.system = line.removeprefix("/system ").strip()
            elif line.startswith("/"):
                print(_HELP)
            elif line:
                chat.say(line)
        except KeyboardInterrupt:  # ends the answer, not the conversation
            print("\n(cancelled)")
        except BallastError as error:
            print(f"ballast: {error}", file=sys.stderr)


class Chat:
    """A conversation with its history. A failed turn is removed from it, so that the next one does not fail, too."""

    def __init__(
        self, client: Client, sampling: "SamplingParams", priority: str, deadline_s: float | None, system: str | None
    ) -> None:
        self.system = system
        self._client = client
        self._sampling = sampling
        self._priority = priority
        self._deadline_s = deadline_s
        self._turns: list[ChatMessage] = []

    def reset(self) -> None:
        self._turns.clear()

    def say(self, text: str) -> None:
        """Send a user's turn and print the answer as it arrives. Ctrl-C cancels the request; the text so far stays in
        the history.
        """
        self._turns.append(ChatMessage("user", text))
        instruction = [ChatMessage("system", self.system)] if self.system else []
        answer: list[str] = []
        try:
            with self._client.stream(
                messages=[*instruction, *self._turns],
                sampling=self._sampling,
                priority=self._priority,
                deadline_s=self._deadline_s,
            ) as stream:
                for chunk in stream:
                    answer.append(chunk.text)
                    print(chunk.text, end="", flush=True)
            print(flush=True)
        except KeyboardInterrupt:
            self._turns.append(ChatMessage("assistant", "".join(answer)))
            raise
        except BallastError:
            if answer:
                print(flush=True)
            self._turns.pop()
            raise
        self._turns.append(ChatMessage("assistant", "".join(answer)))
