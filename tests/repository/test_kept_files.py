"""Files in the folders that this package keeps are opened in one way: whatever has become of them, nobody waits for them,
follows a link, or takes a value of another type."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.repository.package_code import trees, walked

GIVES_FOLDERS = {"paths", "run_list", "queue_list", "last_seen", "record_file"}
"""The modules of `system/` that give the folders, or read from them. Who imports one handles such files."""
READS = (".read_text", ".read_bytes", ".open", "json.load", "json.loads", "gzip.open", "pickle.load", "pickle.loads")
OTHER_FILES = {
    "agent/install_packages.py: open(path, 'wb')": "a wheel, in a new temporary folder",
    "system/log_folder.py: os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 384)": (
        "the list of removed logs, to write it"
    ),
    "system/log_folder.py: os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)": "a log, to lock it",
    "coordinator/relay.py: open(path, 'rb')": "a part of a value, which the coordinator has written",
    "server/listener.py: os.open(os.devnull, os.O_RDONLY)": "a spare descriptor",
    "coordinator/relay.py: Path('/proc/sys/kernel/random/boot_id').read_text('ascii')": "the system's",
    "system/last_seen.py: Path('/proc/sys/kernel/random/boot_id').read_text('ascii')": "the system's",
    "system/paths.py: os.open(path, flags, 384)": "the one way to write",
}
"""What else these modules open, and why that is no reading of a kept file."""


def opened_in(tree: ast.AST, name: str) -> Iterator[str]:
    """The calls in a file that open or read something, if it imports a module that gives the folders."""
    imported = {
        alias.name
        for node in walked(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "jupyter_distrib.system"
        for alias in node.names
    }
    if name == "system/record_file.py" or not (imported & GIVES_FOLDERS or name == "system/paths.py"):
        return
    for node in walked(tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            is_method_of_ours = function.endswith(".open") and function.split(".")[0] in ("self", "group")
            if (function == "open" or function.endswith(READS)) and not is_method_of_ours:
                yield f"{name}: {ast.unparse(node)}"


def test_kept_files_are_read_in_one_place() -> None:
    found = {call for name, tree in trees().items() for call in opened_in(tree, name)}
    assert found - OTHER_FILES.keys() == set(), "read it by `system/record_file.py`, or say here what it is"
    assert OTHER_FILES.keys() - found == set(), "these are no more"


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("(paths.state_directory() / 'x').read_text()", True),
        ("open(paths.state_directory() / 'x')", True),
        ("json.loads(text)", True),
        ("os.open(path, os.O_RDONLY)", True),
        ("record_file.text_of(path)", False),
    ],
)
def test_a_reading_in_another_way_is_found(line: str, is_found: bool) -> None:
    tree = ast.parse(f"from jupyter_distrib.system import paths, record_file\n{line}\n")
    assert bool(list(opened_in(tree, "kernel/module.py"))) is is_found
