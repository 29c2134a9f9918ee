"""Compiles the kernels: `python services/worker/engine/native/build.py`. Standard library only.

Called by `make setup` and when a wheel is built; nothing is compiled when a worker runs. One object file per
instruction set, and one that selects among them. Without a C++ compiler it prints one line, and workers compute with
torch.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
LIBRARY = HERE / "libballast_kernels.so"

_COMMON = "-std=gnu++17 -fPIC -fvisibility=hidden -fno-exceptions -fno-rtti -Wall -Wextra -Wno-psabi"
_FAST = "-O3 -fno-math-errno -fno-trapping-math"
_CHECKED = "-O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all"
_AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma"
# Name -> (bytes of a vector, flags). `dispatch.cpp` selects by processor.
_X86 = {
    "generic": (16, "-msse2"),
    "avx2": (32, "-mavx2 -mfma"),
    "avx512": (64, f"{_AVX512} -mprefer-vector-width=512"),
    "avx512_bf16": (64, f"{_AVX512} -mavx512bf16 -mprefer-vector-width=512"),
}
_OTHERS = {"generic": (16, "")}


NOT_BUILT = "The compiled kernels were not built, workers compute with torch:"


class CannotBuild(Exception):
    """The kernels cannot be built; the message is one line."""


def build(library: Path = LIBRARY, sanitizers: str = "") -> Path:
    """Compile unless the library is newer than all of its sources.

    Raises:
        CannotBuild: no suitable compiler was found, or it failed.
    """
    sources = sorted(SOURCES.iterdir())
    newest_s = max(file.stat().st_mtime for file in [*sources, Path(__file__)])
    if library.exists() and library.stat().st_mtime > newest_s:
        return library
    if sys.platform != "linux":
        raise CannotBuild(f"they are for Linux, this is {sys.platform}")
    compiler = _compiler()
    checks = f"{_CHECKED} -fsanitize={sanitizers}" if sanitizers else _FAST
    isas = _X86 if platform.machine() in ("x86_64", "AMD64") else _OTHERS
    with tempfile.TemporaryDirectory(prefix="ballast-kernels-") as folder:
        jobs = [(SOURCES / "dispatch.cpp", "dispatch.o", ""), (SOURCES / "pool.cpp", "pool.o", "")]
        for name, (vector_bytes, flags) in isas.items():
            flags = f"-DISA={name} -DVECTOR_BYTES={vector_bytes} {flags}"
            jobs.append((SOURCES / "kernels.cpp", f"{name}.o", flags))
        objects = [Path(folder) / name for _, name, _ in jobs]

        def compile_one(job: tuple[Path, str, str]) -> None:
            source, name, flags = job
            options = f"{_COMMON} {checks} {flags}".split()
            _run([compiler, *options, "-c", str(source), "-o", str(Path(folder) / name)])

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(compile_one, jobs))
        linked = library.with_name(f".{library.name}.{os.getpid()}")  # renamed atomically in the same folder
        try:
            _run([compiler, "-shared", *checks.split(), *map(str, objects), "-o", str(linked), "-lm", "-lpthread"])
            linked.replace(library)
        finally:
            linked.unlink(missing_ok=True)
    return library


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "gcc", "cc")):
        found = shutil.which(name)
        if found is None:
            continue
        tried = [found, "-std=gnu++17", "-x", "c++", "-fsyntax-only", "-"]
        if subprocess.run(tried, input=b"int x;", capture_output=True, check=False).returncode == 0:
            return found
    raise CannotBuild("there is no compiler for C++ (g++); install one, or set CXX")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotBuild(f"{' '.join(command)}\n{done.stderr.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=LIBRARY)
    parser.add_argument("--sanitize", default="", metavar="LIST", help="such as address,undefined; slow")
    parser.add_argument("--required", action="store_true", help="fail if the kernels cannot be built")
    arguments = parser.parse_args()
    try:
        build(arguments.out, arguments.sanitize)
    except CannotBuild as error:
        print(NOT_BUILT, error, file=sys.stderr)
        return 1 if arguments.required else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
