"""`ballast doctor`: can this machine run a cluster, and if not, what to do about it. Exit status 1 if something fails.

The checks themselves are in `checks.py`; each gives findings, and this prints them.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ballast.cli import checks
from ballast.cli.arguments import Commands
from ballast.cli.checks import Finding, Verdict

_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("doctor", help="check this machine and say what to do")
    parser.set_defaults(run=run)
    parser.add_argument("--model", type=Path, metavar="DIR", help="also check whether this checkpoint fits")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--port", type=int, default=50051, help="of the first dispatcher")
    parser.add_argument("--dispatchers", type=int, default=1, metavar="N")
    parser.add_argument("--device-memory-bytes", default="1GiB", metavar="BYTES", help="of each worker")


def run(args: argparse.Namespace) -> int:
    budget_bytes = checks.parse_bytes(args.device_memory_bytes)
    findings = [
        checks.python_version(),
        checks.packages(),
        checks.torch_version(),
        checks.gpu_driver(),
        checks.gpu_in_torch(),
        checks.state_server(),
        checks.ports(args.port, args.dispatchers),
        checks.cores(args.workers),
        checks.memory(args.workers, budget_bytes),
        checks.shared_memory(),
        checks.memory_mappings(),
        checks.open_files(),
        checks.clock(),
    ]
    if args.model is not None:
        findings.append(checks.model(args.model, budget_bytes))
    Console().print(render(findings))
    return 1 if any(finding.verdict is Verdict.FAIL for finding in findings) else 0


def render(findings: list[Finding]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n{finding.remedy}", style="bold")
        table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), finding.subject, text)
    return table
