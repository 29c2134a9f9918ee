"""`ballast bench`, with emulated workers from the simulator's catalogue of machines."""

from pathlib import Path

from tools.bench.command import add_parser as add_bench_parser
from tools.bench.emulation import Emulation
from tools.cli.arguments import Commands


def add_parser(commands: Commands) -> None:
    add_bench_parser(commands, emulate)


def emulate(folder: Path, gpu: str, model: Path) -> Emulation:
    """The emulated machine for a GPU and a model of the catalogue; its checkpoint files are written to `folder`.

    Raises:
        ConfigError: the GPU or the model is unknown, or the model does not fit.
    """
    from sim.jobs.machines import catalogue_machine, emulation_of  # imports numpy and more, which only emulation needs

    return emulation_of(folder, catalogue_machine(gpu, str(model)))
