"""`ballast bench plot`: figures, a table and a report out of the results of `ballast bench overload`.

matplotlib's stubs leave some arguments without types, hence the comment below.
"""

# pyright: reportUnknownMemberType=false

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markdown import Markdown

from ballast.common.errors import ConfigError
from ballast.common.extras import lacking
from tools.bench.progress import open_console
from tools.bench.study import read_study
from tools.bench.style import RC

if TYPE_CHECKING:
    from argparse import _SubParsersAction  # pyright: ignore[reportPrivateUsage] -- it has no public name


def add_plot_parser(commands: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plot",
        help="draw what `bench overload` has measured",
        description="Reads result files only. Writes figures (SVG and PNG), table.md, and report.html, which holds"
        " everything and opens without network.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--results", type=Path, required=True, metavar="DIR", help="--out of `bench overload`")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write into")


def run(args: argparse.Namespace) -> int:
    try:
        import matplotlib as mpl

        from tools.bench import figures, report
    except ImportError as error:
        raise lacking("bench plot", "matplotlib", "bench") from error
    console = open_console()
    study = read_study(args.results)
    with mpl.rc_context(RC):
        drawn = figures.draw_all(study)
        files = {one.name: report.files_of(one) for one in drawn}
        table = report.text_table(study)
        page = report.html_report(study, drawn, {name: made["svg"] for name, made in files.items()})
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            for name, made in files.items():
                for form, data in made.items():
                    (args.out / f"{name}.{form}").write_bytes(data)
            (args.out / "table.md").write_text(table)
            (args.out / "report.html").write_text(page)
        except OSError as error:
            raise ConfigError(str(args.out), f"cannot be written: {error.strerror}") from error
    console.print(Markdown(table))
    console.print(f"wrote {args.out / 'report.html'}, table.md and {len(drawn)} figures")
    return 0
