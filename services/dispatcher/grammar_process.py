"""A process that validates grammars for a dispatcher, which kills it on a timeout.

Reads lines of JSON, [grammar, token_ids], and answers each with [] or with [field, reason].
"""

import json
import os
import resource
import sys
from pathlib import Path

from ballast.common.errors import InvalidRequest
from ballast.common.sampling import Grammar, GrammarKind

MOST_MEMORY = 4 << 30
_MOST_KEPT = 16
_POLITENESS = 5  # niceness of the process, so that token streams take precedence


def main() -> None:
    os.nice(_POLITENESS)
    from ballast.service.grammar import Grammars  # imported only here, because this takes half a second or more

    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    grammars = Grammars(Path(sys.argv[1]), most_kept=_MOST_KEPT)
    for line in sys.stdin.buffer:
        (kind, *rest), token_ids = json.loads(line)
        fault: list[str] = []
        try:
            grammars.check(Grammar(GrammarKind(kind), *rest), token_ids)
        except InvalidRequest as error:
            fault = [error.field, error.why]
        except (MemoryError, RecursionError) as error:
            fault = [f"sampling.grammar.{kind}", f"is too large to be compiled: {type(error).__name__}"]
        sys.stdout.buffer.write(json.dumps(fault).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
