"""Everything that `ballast chaos` can break, for a long time, on a cluster with two of every control service.

    python -m benchmarks.nemesis --for 30m
    python -m benchmarks.nemesis --for 10m --secure --seed 7

Four workers, two dispatchers, monitors and planners; three faults at a time. Prints two times for each kind of fault,
p50 and p99: the longest that any request was without a token, from the fault until all was whole, whatever else was
broken then; and how long it took until everything served again, which for a killed process is mostly its start. Then
what became of every request, and whether any token differed. The exit status is 1 if anything was lost, wrong, ended by
itself or did not recover. Other flags are those of `ballast chaos`.

Links between workers break with their workers only: they listen at the very address that they tell others, so nothing
stands in between. `benchmarks.pauses` stops the members of pipelines.
"""

import sys

from tools.cli.main import main

_FLAGS = "--workers 4 --dispatchers 2 --monitors 2 --planners 2 --fault-every-s 4 --at-once 3"

if __name__ == "__main__":
    sys.exit(main(["chaos", *_FLAGS.split(), *sys.argv[1:]]))
