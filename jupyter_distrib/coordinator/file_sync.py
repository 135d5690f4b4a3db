"""Collects the notebook's own files for nodes that do not share its folders. Runs in the coordinator, on the kernel's
machine.

Small files that have changed since the last run are copied: from the folder of the notebook to `0/`, and from the
other folders of its path to `1/`, `2/`, ... Folders that git ignores are left out, except for packages of Python, which
may be generated. So are links to hidden files elsewhere: a folder that was downloaded may hold one to the user's keys.

A folder is listed again only when its modification time has changed. That time shows whether files were added or
removed, not whether they were written, so each file is checked.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jupyter_distrib.system import git_folder, record_file
from jupyter_distrib.system.formatting import duration
from jupyter_distrib.wire import messages as m

FILE_LIMIT_BYTES = 1 << 20
"""Size above which a file counts as data and is not copied: nodes read it from where it is stored."""
TOTAL_LIMIT_BYTES = 100 << 20
COUNT_LIMIT = 5000
SLOW_S = 0.2
"""Duration in seconds of a file scan above which the kernel gets a note that its cells wait for it."""

PART_BYTES = 1 << 20
"""Size of the files that are sent to a node at a time; a file is not divided."""

Stamp = tuple[int, int, bool]
"""Modification time and size of a file, and whether its owner may execute it."""
CopiedFile = tuple[str, int, bool, bytes]
"""Name, modification time, whether it is executable, and content. A name that ends with `/` is that of an empty
folder."""
FilePart = tuple[Sequence[CopiedFile], Sequence[str]]
"""Some files, and names of files that are gone."""
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages"})
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
"""File names that every virtual environment has, or every conda environment."""
_OF_SYSTEM = ("/proc/", "/sys/")
"""Folders whose files describe processes, such as the coordinator's environment."""
_RULES = ".gitignore"
_COARSE_NS = 2_000_000_000
"""Age below which a modification time cannot be trusted: file systems may count in whole seconds, and a server's clock
may be slightly off."""


@dataclass(frozen=True, slots=True)
class Found:
    """Files of the folders by their names on nodes: path on this machine, and stamp."""

    files: Mapping[str, tuple[str, Stamp]]
    left_out: str
    """Sentence about files that were left out; empty if there are none."""


class FileSync:
    """The files that one node already has."""

    def __init__(self) -> None:
        self._known: dict[str, Stamp] = {}
        self._compared: Found | None = None
        """The files that the node was last compared with, if it has all of them."""

    def changes(self, folder: Found) -> tuple[list[CopiedFile], list[str]]:
        """Return files that are new or changed, and names of files that are gone."""
        if folder is self._compared:
            return [], []
        files, unread = [], []
        for name, (full, stamp) in folder.files.items():
            if self._known.get(name) != stamp:
                if name.endswith("/"):
                    files.append((name, 0, False, b""))
                    continue
                try:
                    with record_file.opened(full, through_links=True) as file:
                        files.append((name, stamp[0], stamp[2], file.read(FILE_LIMIT_BYTES)))  # it may be growing
                except OSError:  # gone or not readable: a rank that needs the file will say so
                    unread.append(name)
        gone = [name for name in self._known if name not in folder.files]
        self._known = {name: stamp for name, (_, stamp) in folder.files.items()}
        self._compared = folder
        self.forget(unread)
        return files, gone

    def forget(self, names: Sequence[str]) -> None:
        """Mark files as missing on the node, so that they are sent again the next time."""
        for name in names:
            self._known.pop(name, None)
            self._compared = None


def parts(files: Sequence[CopiedFile], gone: Sequence[str]) -> list[FilePart]:
    """Return files in parts, at least one; the names of files that are gone are in the first."""
    divided: list[list[CopiedFile]] = [[]]
    size_bytes = 0
    for file in files:
        size_bytes += len(file[3])
        if size_bytes > PART_BYTES and divided[-1]:
            divided.append([])
            size_bytes = len(file[3])
        divided[-1].append(file)
    return [(part, () if number else gone) for number, part in enumerate(divided)]


def own_files(folder: str) -> Iterator[str]:
    """Yield the files in a folder, by their paths in it, but for hidden ones and compiled modules."""
    for inside, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _LEFT_OUT]
        for name in files:
            if not name.startswith("."):
                yield os.path.join(inside, name)[len(folder) + 1 :]


def directory(hello: m.Hello) -> str:
    """Return the notebook's folder: its kernel's working directory, as far as the system tells."""
    try:
        return os.readlink(f"/proc/{hello.pid}/cwd")
    except OSError:
        return os.getcwd()


def is_shared(on_node: Sequence[int] | None, before: Sequence[int] | None, after: Sequence[int] | None) -> bool:
    """Return whether a node's folder is the notebook's folder: its `stamp` on the node must lie between its stamps on
    this machine from before and after, since something (if only the notebook) may be written into it meanwhile.

    Ranks import from that folder. A stranger on the node can make a folder with the same inode and time, but not
    with the same owner; in a container the owner may have another uid, and be the user there.
    """
    if on_node is None or before is None or after is None:
        return False
    number, at_ns, owner, is_own = on_node
    is_same = number == before[0] == after[0] and before[1] <= at_ns <= after[1]
    return is_same and (bool(is_own) or owner == before[2])


class ProjectFiles:
    """The notebook's own files: those in its folder and in the folders of its path."""

    def __init__(self) -> None:
        self._listings = FolderListings()
        self._last: Found | None = None
        self._slow = ""
        """Sentence about a slow scan, although the folders had been listed before."""

    def scan(self, directory: str, path: Sequence[str]) -> Found:
        """Scan the folders; returns the same object as long as nothing changes."""
        began_s = time.monotonic()
        found = self._scan(directory, path)
        if self._last is not None and not self._slow and (took_s := time.monotonic() - began_s) > SLOW_S:
            self._slow = _too_slow(directory, took_s)
        astray = _astray(self._listings.links_left_out(directory))
        sentences = (found.left_out, _ignored(self._listings.left_out(directory)), astray, self._slow)
        found = replace(found, left_out=" ".join(filter(None, sentences)))
        if self._last is None or found != self._last:
            self._last = found
        return self._last

    def _scan(self, directory: str, path: Sequence[str]) -> Found:
        files: dict[str, tuple[str, Stamp]] = {}
        total, largest = 0, (FILE_LIMIT_BYTES, "")
        for number, folder in enumerate(dict.fromkeys((directory, *path))):
            for inside, entries in self._listings.walk(folder):
                prefix = f"{number}/{inside}"
                if number == 0 and inside and not entries and _is_empty(full := os.path.join(folder, inside)):
                    files[prefix] = (full, (0, 0, False))
                for name, full in entries:
                    try:
                        info = os.stat(full)
                    except OSError:
                        continue
                    if not stat.S_ISREG(info.st_mode):  # a FIFO without a writer, or a device without an end
                        continue
                    size = info.st_size
                    if size > FILE_LIMIT_BYTES:
                        if number == 0 or _is_in_package(folder, inside):
                            largest = max(largest, (size, full))
                        continue
                    total += size
                    if len(files) >= COUNT_LIMIT or total > TOTAL_LIMIT_BYTES:
                        too_many = _too_many(folder, is_of_notebook=number == 0)
                        return Found(files, f"{too_many} {_too_large(*largest)}".rstrip())
                    files[prefix + name] = (full, _stamp(info))
        return Found(files, _too_large(*largest))


def _is_empty(folder: str) -> bool:
    try:
        return not os.listdir(folder)
    except OSError:
        return False


def _is_in_package(folder: str, inside: str) -> bool:
    """Return whether a folder of the path is part of a package there.

    A cell does not miss the rest of a checkout, such as the products of its builds and tests.
    """
    top = inside.partition("/")[0]
    return top != "" and os.path.isfile(os.path.join(folder, top, "__init__.py"))


def _too_many(folder: str, *, is_of_notebook: bool) -> str:
    what = "start the notebook in a folder of its own" if is_of_notebook else "put a smaller folder on sys.path instead"
    return (
        f"{folder} has more than {COUNT_LIMIT} files or {TOTAL_LIMIT_BYTES >> 20} MB: not all of it is on the nodes; "
        f"{what}."
    )


def _ignored(folders: Sequence[str]) -> str:
    if not folders:
        return ""
    others = len(folders) - 1
    more = f", nor {'are' if others > 1 else 'is'} {others} other such folder{'s' * (others > 1)}" if others else ""
    return (
        f"{folders[0]} is not on the nodes, since git ignores it{more}: have the ranks read data from a place that all "
        f"nodes can reach, or take the folder out of {_RULES}."
    )


def _astray(links: Sequence[str]) -> str:
    if not links:
        return ""
    return f"{links[0]} is not on the nodes, since it links to a hidden file elsewhere: copy that file into the folder."


def _too_slow(folder: str, took_s: float) -> str:
    return (
        f"each cell waits {duration(took_s)} for a scan of the files of {folder}, which are copied to the nodes: "
        "start the notebook in a folder of its own, or in one that the nodes share."
    )


def _too_large(size_bytes: int, path: str) -> str:
    if not path:
        return ""
    return (
        f"{path} ({size_bytes >> 20} MB) is not on the nodes, nor is any other file over {FILE_LIMIT_BYTES >> 20} MB: "
        "have the ranks read such data from a place that all nodes can reach."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """The entries of one folder, sorted."""

    mtime_ns: int
    """Modification time of the folder before it was listed; -1 if that was too recent to be trusted."""
    files: Sequence[tuple[str, str]]
    """Name and path of each file."""
    folders: Sequence[tuple[str, str]]
    """Name and path of each folder."""
    links_left_out: Sequence[str]
    """The paths of links to hidden files elsewhere."""
    has_rules: bool
    """Whether a file there says what git ignores."""
    is_environment: bool


_NOTHING = _Listing(mtime_ns=-1, files=(), folders=(), links_left_out=(), has_rules=False, is_environment=False)


class _IgnoredFolders:
    """The folders below one that git ignores. Git is asked again, at most once in a walk, when a folder has been added
    or the rules have changed."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._paths: frozenset[str] = frozenset()
        self._asked_with: dict[str, tuple[Sequence[tuple[str, str]], Stamp | None]] = {}
        """For each folder that was walked: the folders in it, and the stamp of its rules."""
        self._may_ask = True
        self.left_out: list[str] = []
        """The folders that this walk has left out."""
        self.links_left_out: list[str] = []

    def begin_walk(self) -> None:
        self._may_ask = True
        self.left_out, self.links_left_out = [], []

    def kept(self, folder: str, listing: _Listing) -> Iterator[tuple[str, str]]:
        """Yield the folders in one that git does not ignore."""
        now = (listing.folders, file_stamp(f"{folder}/{_RULES}") if listing.has_rules else None)
        if now != self._asked_with.get(folder, ((), None)) and self._may_ask:
            self._paths = git_folder.ignored_folders(self.root)
            self._may_ask = False
        self._asked_with[folder] = now
        for name, path in listing.folders:
            if path not in self._paths or os.path.exists(f"{path}/__init__.py"):
                yield name, path
            elif not any(os.path.exists(f"{path}/{each}") for each in _ENVIRONMENTS):
                self.left_out.append(path)


def file_stamp(path: str) -> Stamp | None:
    """Return a value that changes when the file is written; None if there is no file."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return _stamp(info)


def _stamp(info: os.stat_result) -> Stamp:
    return info.st_mtime_ns, info.st_size, bool(info.st_mode & stat.S_IXUSR)


class FolderListings:
    """The listings of all folders that were scanned."""

    def __init__(self) -> None:
        self._known: dict[str, _Listing] = {}
        self._ignored: dict[str, _IgnoredFolders] = {}

    def walk(self, folder: str) -> Iterator[tuple[str, Sequence[tuple[str, str]]]]:
        """Yield each folder in it by its name there (`""`, `deep/`), with the name and path of each of its files.
        Leaves out hidden files, files that Python or npm made, environments, and folders that git ignores."""
        ignored = self._ignored.setdefault(folder, _IgnoredFolders(folder))
        ignored.begin_walk()
        yield from self._walk(folder, "", ignored)

    def left_out(self, folder: str) -> Sequence[str]:
        """Return the folders in it that the last walk has left out because git ignores them."""
        return self._ignored[folder].left_out

    def links_left_out(self, folder: str) -> Sequence[str]:
        """Return the links in it that the last walk has left out because they lead to hidden files elsewhere."""
        return self._ignored[folder].links_left_out

    def _walk(
        self, folder: str, inside: str, ignored: _IgnoredFolders
    ) -> Iterator[tuple[str, Sequence[tuple[str, str]]]]:
        listing = self._listing(folder, ignored.root)
        if inside and listing.is_environment:
            return
        ignored.links_left_out += listing.links_left_out
        yield inside, listing.files
        for name, path in ignored.kept(folder, listing):
            yield from self._walk(path, f"{inside}{name}/", ignored)

    def _listing(self, folder: str, root: str) -> _Listing:
        known = self._known.get(folder, _NOTHING)
        try:
            mtime_ns = os.stat(folder).st_mtime_ns
            if mtime_ns != known.mtime_ns:
                self._known[folder] = known = _listed(folder, mtime_ns, root)
        except OSError:  # gone or not readable: the folder has nothing to copy
            self._known.pop(folder, None)
            return _NOTHING
        return known


def _is_astray(link: str, root: str) -> bool:
    """Return whether a link leads out of the root to a file that is hidden there, or to one of the system's own."""
    real, top = os.path.realpath(link), os.path.realpath(root)
    if os.path.commonpath((real, top)) == top:
        return False
    beside = os.path.relpath(real, top).split("/")
    return real.startswith(_OF_SYSTEM) or any(each.startswith(".") and each != ".." for each in beside)


def _listed(folder: str, mtime_ns: int, root: str) -> _Listing:
    age_ns = time.time_ns() - mtime_ns
    files, folders, links_left_out, names = [], [], [], set()
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            name = entry.name
            names.add(name)
            if name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                if name not in _LEFT_OUT:
                    folders.append((name, entry.path))
            elif not name.endswith((".ipynb", ".pyc")) and not entry.is_dir():
                if entry.is_symlink() and _is_astray(entry.path, root):
                    links_left_out.append(entry.path)
                else:
                    files.append((name, entry.path))
    return _Listing(
        mtime_ns=mtime_ns if age_ns > _COARSE_NS else -1,
        files=files,
        folders=folders,
        links_left_out=links_left_out,
        has_rules=_RULES in names,
        is_environment=not names.isdisjoint(_ENVIRONMENTS),
    )
