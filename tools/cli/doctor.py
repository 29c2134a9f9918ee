"""`ballast doctor`: checks whether this machine can run a cluster and suggests remedies. Exit status 1 if a check
fails.

The checks are in `checks.py`; this module prints their findings.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ballast.common.arguments import size
from ballast.service.models import find_model
from tools.cli import checks
from tools.cli.arguments import Commands, add_json
from tools.cli.checks import Finding, Verdict
from tools.cli.output import print_json

_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("doctor", help="check whether this machine can run a cluster, and suggest remedies")
    parser.set_defaults(run=run)
    parser.add_argument("--model", metavar="MODEL", help="also check whether this model fits: a folder, or org/name")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="number of workers on this machine (2)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks of each worker (1)")
    parser.add_argument("--port", type=int, default=50051, help="port of the first dispatcher (50051)")
    parser.add_argument(
        "--dispatchers", type=int, default=1, metavar="N", help="number of dispatchers on this machine (1)"
    )
    parser.add_argument(
        "--device-memory-bytes",
        type=size,
        default=1 << 30,
        metavar="SIZE",
        help="memory budget of each rank of each worker (1GiB)",
    )
    parser.add_argument("--tls-dir", type=Path, metavar="DIR", help="also check the validity of this certificate")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    budget_bytes: int = args.device_memory_bytes
    ranks: int = max(1, args.tensor_parallel_size)
    findings = [
        checks.python_version(),
        checks.packages(),
        checks.torch_version(),
        checks.gpu_driver(),
        checks.gpu_in_torch(),
        checks.kernel_compiler(),
        checks.container_toolkit(),
        checks.state_server(),
        checks.ports(args.port, args.dispatchers),
        checks.cores(args.workers * ranks),
        checks.memory(args.workers * ranks, budget_bytes),
        checks.shared_memory(),
        checks.memory_mappings(),
        checks.open_files(),
        checks.clock(),
    ]
    if args.model is not None:
        folder = find_model(args.model, weights=True).folder
        findings.append(checks.model(folder, budget_bytes, ranks))
        if ranks == 1:
            findings.append(checks.host_copy(folder))
    if args.tls_dir is not None:
        findings.append(checks.certificate(args.tls_dir))
    if args.json:
        print_json({"findings": findings})
    else:
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
