"""Any content of checkpoint, trace and scenario files is either read or refused with a Ballast error."""

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ballast.common.errors import BallastError
from services.dispatcher.text import PromptEncoder
from sim.scenario import read_scenario
from tools.bench.traces import read_trace
from tools.model.info import read_info
from tools.model.tiny import make_tiny

ROUNDS = 400
_ODD = (None, True, -1, 0, 1 << 70, 1e308, float("nan"), "", "x" * 5000, [], {}, [[]], {"a": {"b": []}})


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("good") / "tiny", max_len=128)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with an odd or missing value in its JSON, or with random bytes in it."""
    if rng.random() < 0.5:
        return noisy(data, rng)
    content = json.loads(data)
    place, key = content, rng.choice(list(content))
    while isinstance(place[key], dict) and place[key] and rng.random() < 0.7:
        place = place[key]
        key = rng.choice(list(place))
    if rng.random() < 0.3:
        del place[key]
    else:
        place[key] = rng.choice(_ODD)
    return json.dumps(content).encode()


def hurt(good: Path, folder: Path, name: str, read: Callable[[Path], object], rng: random.Random) -> None:
    path = folder / name
    original = (good / name).read_bytes()
    for _ in range(ROUNDS // 4 if len(original) > 100_000 else ROUNDS):
        path.write_bytes(mutated(original, rng))
        with contextlib.suppress(BallastError):
            read(folder)
    path.write_bytes(original)
    read(folder)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_info),
        ("tokenizer.json", PromptEncoder),
        ("tokenizer_config.json", PromptEncoder),
        ("generation_config.json", read_info),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mutated_checkpoint_files(good: Path, tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    if not (good / name).exists():
        pytest.skip("there is none")
    hurt(good, folder, name, read, random.Random(name))


def test_mutated_safetensors_headers(good: Path, tmp_path: Path) -> None:
    folder, rng = tmp_path / "model", random.Random(1)
    shutil.copytree(good, folder)
    [shard] = list(folder.glob("*.safetensors"))
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for _ in range(ROUNDS):
        header = mutated(data[8 : 8 + length], rng)
        said = rng.choice((len(header), 0, 1 << 63, (1 << 64) - 1, len(data)))
        shard.write_bytes(said.to_bytes(8, "little") + header + data[8 + length :])
        with contextlib.suppress(BallastError):
            read_info(folder)


TRACES = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.9,3,1\n",
    "ours.jsonl": '{"arrival_s": 0.5, "input_tokens": 3, "output_tokens": 5}\n',
}


@pytest.mark.parametrize("name", TRACES)
def test_mutated_traces(tmp_path: Path, name: str) -> None:
    rng, data, read_count = random.Random(name), TRACES[name].encode(), 0
    for _ in range(ROUNDS):
        (tmp_path / name).write_bytes(noisy(data, rng))
        with contextlib.suppress(BallastError):
            read_trace(tmp_path / name)
            read_count += 1
    assert read_count < ROUNDS


SCENARIO = b"model: Qwen2.5-14B\ninstances: 4\nseed: 1\ntrace: there.csv\nfaults: [{at_s: 1.0}]\nblock_size: 16\n"
NOISE = (b"nan", b"-1", b"1e400", b"9" * 400, b"[" * 20_000, b"&a [*a, *a]", b"\x00", b"\xff")


def test_mutated_scenarios(tmp_path: Path) -> None:
    rng, path = random.Random(3), tmp_path / "scenario.yaml"
    for _ in range(ROUNDS):
        path.write_bytes(noisy(SCENARIO, rng))
        with contextlib.suppress(BallastError):
            read_scenario(path)


def noisy(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                del changed[at : at + rng.randint(1, 20)]
            case 1 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 2:
                changed[at:at] = rng.choice(
                    (b"nan", b"-1", b"1e400", b"9" * 400, b"[" * 20_000, b"&a [*a, *a]", b"\x00", b"\xff")
                )
            case _:
                changed[at:at] = rng.randbytes(rng.randint(1, 16))
    return bytes(changed)
