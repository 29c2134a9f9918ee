"""The profile's file survives writing and reading, and any other content is refused with a reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ballast.common.cost import CostModel
from ballast.common.errors import ConfigError
from services.worker.cost_profile import (
    CopyCosts,
    CostProfile,
    Costs,
    Errors,
    HeldOut,
    LinkCosts,
    ProfileKey,
    now,
    read_matching,
    read_profile,
    write_profile,
)
from services.worker.policy.cost_fit import CostForm, ErrorSummary, StageCosts

KEY = ProfileKey(
    architecture="llama",
    parameter_count=1000,
    layer_count=4,
    kv_bytes_per_token=256,
    dtype="float32",
    device="a processor",
    torch="2.13.0",
    threads=1,
)
STAGES = StageCosts(
    layer=CostModel(1e-8, 2e-6, 5e-5, 4e-5, 3e-9),
    step=CostModel(0.0, 0.0, 2e-4, 1e-4),
    first=CostModel(0.0, 1e-7, 1e-5, 1e-5),
    last=CostModel(0.0, 0.0, 4e-4, 3e-4),
)


def make_profile() -> CostProfile:
    errors = Errors.of(ErrorSummary(20, 0.02, 0.05, 0.1))
    return CostProfile(
        created_at=now(),
        model="tiny",
        clock="processor time",
        key=KEY,
        costs=Costs.of(STAGES),
        sample_count=80,
        held_out={form: HeldOut(without_prefix=errors, with_prefix=errors) for form in CostForm},
        link=LinkCosts(bandwidth_bytes_per_s=1e9, latency_s=1e-4),
        remap_s_per_gb=0.01,
        copies=CopyCosts(to_device_bytes_per_s=5e9, from_device_bytes_per_s=5e9),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profiles" / "tiny.json"
    write_profile(path, make_profile())
    return path


def test_a_written_profile_reads_back(file: Path) -> None:
    profile = read_matching(file, KEY)
    assert profile.costs.stages() == STAGES
    assert profile.key == KEY


def test_a_profile_of_another_setup_is_refused_with_the_difference(file: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"layer_count is 4 there but 8 here; torch is 2\.13\.0 there but 9\.9 here"
    ) as caught:
        read_matching(file, KEY.model_copy(update={"layer_count": 8, "torch": "9.9"}))
    assert caught.value.path == str(file)
    assert "ballast profile" in caught.value.why


def _older(data: dict[str, Any]) -> None:
    data["version"] = 0


def _negative(data: dict[str, Any]) -> None:
    data["costs"]["layer"]["token_s"] = -1.0


def _inconsistent(data: dict[str, Any]) -> None:
    data["costs"]["last"]["shared_s"] = 1.0


def _unknown(data: dict[str, Any]) -> None:
    data["more"] = 1


def _incomplete(data: dict[str, Any]) -> None:
    del data["key"]["dtype"]


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (_older, "version"),
        (_negative, "costs.layer.token_s"),
        (_inconsistent, "costs.last"),
        (_unknown, "more"),
        (_incomplete, "key.dtype"),
    ],
)
def test_a_wrong_file_is_refused_by_its_first_wrong_field(
    file: Path, spoil: Callable[[dict[str, Any]], None], where: str
) -> None:
    data = json.loads(file.read_text())
    spoil(data)
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=rf"no cost profile of version 1: {where}: .*ballast profile"):
        read_profile(file)


@pytest.mark.parametrize("content", [b"", b"[]", b"no JSON", b"\xff\xfe\x00"])
def test_other_files_than_profiles_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="no cost profile"):
        read_profile(path)


def test_a_missing_file_and_an_uncreatable_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_profile(tmp_path / "missing.json")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_profile(tmp_path / "file" / "profile.json", make_profile())
