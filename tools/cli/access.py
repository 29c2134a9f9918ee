"""The flags `--token`, `--ca-file` and `--tls-dir` of all commands that call a cluster."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from ballast.common.credentials import CA_FILE, TLS_DIR, TOKEN


class _ExportedVariable(argparse.Action):
    """Argparse action that stores the value in the environment, where every client of this process reads it."""

    # Any: argparse's signature
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        os.environ[str(self.const)] = str(values)


def add_access(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, variable: str, metavar: str, text: str) -> None:
        parser.add_argument(
            flag,
            action=_ExportedVariable,
            const=variable,
            metavar=metavar,
            default=argparse.SUPPRESS,
            help=f"{text} ({variable})",
        )

    add("--token", TOKEN, "TOKEN", "token for the cluster, if it requires one")
    add("--ca-file", CA_FILE, "FILE", "CA of the dispatchers' certificates; implies TLS")
    add(
        "--tls-dir",
        TLS_DIR,
        "DIR",
        "folder with an operator's certificate, for calls to services other than dispatchers",
    )
