"""Client tokens: the file, the commands that change it, and the `TokenBook` that follows it."""

import asyncio
from pathlib import Path

import pytest

from ballast.common.errors import ConfigError
from ballast.common.sampling import ALL_CLASSES, PriorityClass
from ballast.service.tokens import TokenBook, TokenRole, cluster_token, digest_of, read_tokens
from tests.support.waiting import soon
from tools.cli.main import main


def add(file: Path, name: str, role: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["tokens", "add", "--file", str(file), "--role", role, name]) == 0
    return capsys.readouterr().out.strip()


def test_a_token_is_printed_once_and_stored_as_a_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens"
    alice, bob = add(file, "alice", "infer", capsys), add(file, "bob", "operate", capsys)
    assert alice != bob
    assert alice not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    book = TokenBook(file)
    assert [(t.name, t.role) for t in (book.find(alice), book.find(bob)) if t] == [
        ("alice", TokenRole.INFER),
        ("bob", TokenRole.OPERATE),
    ]
    assert book.find(alice[:-1]) is None
    assert book.find("") is None
    assert main(["tokens", "list", "--file", str(file)]) == 0
    assert capsys.readouterr().out == "alice  infer\nbob  operate\n"


def test_a_name_has_one_token_that_can_be_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens"
    token = add(file, "alice", "infer", capsys)
    assert main(["tokens", "add", "--file", str(file), "alice"]) == 2
    assert "remove" in capsys.readouterr().err
    assert main(["tokens", "remove", "--file", str(file), "alice"]) == 0
    assert TokenBook(file).find(token) is None
    assert main(["tokens", "remove", "--file", str(file), "alice"]) == 1
    for name in ("", "two words", "#x", "a\nb", "x" * 65):
        assert main(["tokens", "add", "--file", str(file), "--", name]) == 2


@pytest.mark.parametrize(
    "line", ["alice", "alice infer sha256:12", f"alice king sha256:{'a' * 64}", f"alice infer {'a' * 64}"]
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# ours\n\n{line}\n")
    with pytest.raises(ConfigError, match=r"tokens:3: must be NAME ROLE"):
        read_tokens(file)


def test_the_clusters_own_token_is_valid_in_addition_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("")
    own = cluster_token(b"x" * 32)
    found = TokenBook(tmp_path / "tokens", own).find(own)
    assert found is not None
    assert found.role is TokenRole.OPERATE
    assert TokenBook(tmp_path / "tokens", cluster_token(b"y" * 32)).find(own) is None


async def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"alice infer sha256:{digest_of('first')}\n")

    book = TokenBook(file)
    following = asyncio.create_task(book.follow())
    assert book.find("first")
    file.write_text(f"alice infer sha256:{digest_of('second')}\n")
    await soon(lambda: book.find("second") is not None)
    assert book.find("first") is None
    file.write_text("nonsense\n")
    await asyncio.sleep(1.5)
    assert book.find("second")
    file.unlink()
    await asyncio.sleep(1.5)
    assert book.find("second")
    following.cancel()


def test_a_token_may_be_limited_to_some_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens"
    assert main(["tokens", "add", "--file", str(file), "--classes", "default,batch", "nightly"]) == 0
    token = capsys.readouterr().out.strip()
    add(file, "alice", "infer", capsys)
    book = TokenBook(file)
    assert [t.classes for t in (book.find(token), book.find("x")) if t] == [
        {PriorityClass.DEFAULT, PriorityClass.BATCH}
    ]
    assert read_tokens(file)["alice"].classes == ALL_CLASSES
    assert main(["tokens", "list", "--file", str(file)]) == 0
    assert capsys.readouterr().out == "nightly  infer  batch,default\nalice  infer\n"
    assert main(["tokens", "add", "--file", str(file), "--classes", "fast", "bob"]) == 2
    assert "interactive, default, batch" in capsys.readouterr().err
