"""`ballast bench`, and what it has to be told of emulated workers: machines are made from the simulator's catalogue."""

from pathlib import Path

from tools.bench.command import add_parser as add_bench_parser
from tools.bench.emulation import Emulation
from tools.cli.arguments import Commands


def add_parser(commands: Commands) -> None:
    add_bench_parser(commands, emulate)


def emulate(folder: Path, gpu: str, model: Path) -> Emulation:
    """
    Raises:
        ConfigError: naming what is not known, or does not fit.
    """
    from sim.jobs.machines import catalogue_machine, emulation_of  # numpy and more: for those who emulate

    return emulation_of(folder, catalogue_machine(gpu, str(model)))
