"""Rules about the project's files themselves: sizes, names, comments, and what is not in them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tasuki", "prefill", "decode", "router", "experiments", "cli", "planner")
MOST_LINES = 400
MOST_LINES_OF_A_PACKAGE = 2500

BANNED_WORDS = frozenset(
    ["manager", "utils", "helper", "misc", "common", "data", "info", "instance", "page"]
) | {"swap", "stage"}
BANNED_WHOLE = frozenset({"pool", "context"})
ALLOWED = {
    "KVCacheManager": "the one manager of the vocabulary",
    "manager": "tasuki/kv/manager.py, where it lives",
    "http_page": "a page of HTTP, not of KV",
    "HttpPage": "a page of HTTP, not of KV",
}


def product_files() -> list[Path]:
    """Our own Python files; generated stubs and tests apart."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(path for path in files if ROOT / "tasuki" / "v1" not in path.parents)


def project_files() -> list[Path]:
    """Every file that is or would be committed; without git, every file outside caches."""
    try:
        command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=30)
        names = listed.stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        hidden = re.compile(r"(^|/)(\.venv|\.git|\.[a-z_]*cache|\.hypothesis|build|__pycache__)/")
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
        names = [name for name in names if not hidden.search(name + "/")]
    return sorted(path for name in names if name and (path := ROOT / name).is_file())


def words(name: str) -> list[str]:
    """The words of a snake_case or CamelCase name, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]


def banned(name: str) -> bool:
    """Whether a module or class name says something the vocabulary has a better word for."""
    if name in ALLOWED:
        return False
    return name.lower() in BANNED_WHOLE or bool(BANNED_WORDS & set(words(name)))


def test_the_name_rule_itself() -> None:
    assert [name for name in ("WorkerInfo", "data_path", "Pool", "utils") if not banned(name)] == []
    fine = ("BlockPool", "WorkerPool", "KVCacheManager", "staging", "Database", "ServerContextual")
    assert [name for name in fine if banned(name)] == []


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in product_files()}
    assert {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > MOST_LINES} == {}


def test_no_package_is_longer_than_2500_lines() -> None:
    """What its subpackages hold is theirs."""
    lengths = Counter[str]()
    for path in product_files():
        lengths[str(path.parent.relative_to(ROOT))] += len(path.read_text().splitlines())
    assert {package: n for package, n in lengths.items() if n > MOST_LINES_OF_A_PACKAGE} == {}


def test_no_banned_names() -> None:
    found = []
    for path in product_files():
        where = str(path.relative_to(ROOT))
        folder = path.relative_to(ROOT).parts[:-1]
        found += [where for name in (path.stem, *folder) if banned(name)]
        found += [
            f"{where}: class {node.name}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ClassDef) and banned(node.name)
        ]
    assert found == []


def test_every_module_says_what_it_is() -> None:
    empty_or_described = [
        str(path.relative_to(ROOT))
        for path in product_files()
        if (text := path.read_text()).strip() and not ast.get_docstring(ast.parse(text))
    ]
    assert empty_or_described == []


def undocumented(proto: str) -> Iterator[str]:
    """Declarations of a .proto text that no comment stands above."""
    declared = re.compile(
        r"\s*(message|enum|service|rpc|oneof)\s+(\w+)"
        r"|\s*(?:optional |repeated )?[\w.<>, ]+\s(\w+) = \d+"
    )
    previous = ""
    for line in proto.splitlines():
        match = declared.match(line)
        if match and not previous.strip().startswith("//"):
            yield match.group(2) or match.group(3) or line.strip()
        previous = line


def test_the_comment_rule_itself() -> None:
    text = "// Said.\nmessage A {\n  // Said.\n  uint32 b = 1;\n  map<string, string> c = 2;\n}\n"
    text += "enum D {"
    assert list(undocumented(text)) == ["c", "D"]


@pytest.mark.parametrize("proto", sorted((ROOT / "proto").rglob("*.proto")), ids=lambda p: p.name)
def test_every_message_and_field_has_a_comment(proto: Path) -> None:
    assert list(undocumented(proto.read_text())) == []


def test_there_is_a_changelog_with_an_unreleased_part() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_no_registry_hosts_and_no_paths_of_one_machine() -> None:
    # Written in pieces, or this file would find itself.
    hosts = [
        "py" + "pi.org",
        "python" + "hosted.org",
        "download.py" + "torch.org",
        "deb." + "debian.org",
    ]
    hosts += ["registry.npm" + "js.org", "huggingface" + ".co/"]
    paths = [
        "/tmp/" + "w/",
        "/work/" + "main",
        "/root/" + ".",
        "/home/" + "user",
        "/opt/" + "wheels",
    ]
    found = []
    for path in project_files():
        text = path.read_text(errors="ignore")
        found += [f"{path.relative_to(ROOT)}: {bad}" for bad in hosts + paths if bad in text]
    assert found == []


def test_ci_is_a_program() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


UNSAFE = re.compile(
    r"\b(pickle|marshal|shelve)\.(load|open|Unpickler)|^\s*(import|from) (pickle|marshal|shelve)"
    r"|torch\.load\(|yaml\.(unsafe|full)_load\(|\beval\(|\bexec\(|allow_pickle",
    re.MULTILINE,
)


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_unpickled_or_evaluated(package: str) -> None:
    """What comes over a wire or from a disk is data, never code."""
    for path in (ROOT / package).rglob("*.py"):
        found = UNSAFE.search(path.read_text())
        assert found is None, f"{path.relative_to(ROOT)}: {found}"
