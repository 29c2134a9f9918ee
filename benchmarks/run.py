"""`make bench`: every benchmark of this folder, one after the other, each writing its results next to the earlier ones.

Ratios are taken inside one run of one script, so the scripts never run at the same time: the machine has to be theirs.
"""

import argparse
import subprocess
import sys
import time

from rich.console import Console

# module, arguments, what it measures
BENCHMARKS = (
    ("benchmarks.worker_core", (), "deciding: time per step outside the engine"),
    ("benchmarks.transfers", (), "activations beside a bulk exchange on a link"),
    ("benchmarks.remap", (), "moving memory between parameters and KV cache"),
    ("benchmarks.engine_throughput", (), "offline throughput against transformers"),
    ("benchmarks.engine_against_vllm", (), "the engine's kernels beside torch's (with --vllm: beside vLLM)"),
    ("benchmarks.decode_steps", (), "steps of a few rows beside reading the parameters"),
    ("benchmarks.sampler", (), "choosing tokens of large vocabularies"),
    ("benchmarks.memory_growth", (), "whether the services stop growing under load"),
    ("benchmarks.dispatcher_relay", (), "tokens relayed, and the time a dispatcher adds to the first one"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, for instance: engine_throughput remap")
    names: list[str] = parser.parse_args().names
    console = Console()
    failed: list[str] = []
    for module, arguments, what in BENCHMARKS:
        name = module.removeprefix("benchmarks.")
        if names and name not in names:
            continue
        console.rule(f"{name}: {what}")
        began_s = time.monotonic()
        code = subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode
        console.print(f"[dim]{name}: {time.monotonic() - began_s:.0f} s, exit status {code}[/dim]")
        if code != 0:
            failed.append(name)
    if failed:
        console.print(f"[red]failed: {', '.join(failed)}[/red]")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
