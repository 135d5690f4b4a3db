"""Pools and defaults from TOML files and the environment: which one wins, and what is said of a slip."""

from __future__ import annotations

import os
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.settings import config_files, find_files, project_files
from jupyter_distrib.kernel.settings.cell_options import OPTIONS, Options
from jupyter_distrib.kernel.settings.settings import NamedPool, Settings, built_in
from jupyter_distrib.options import Option, count_or_range, json_object
from jupyter_distrib.pools import base
from jupyter_distrib.system import other_users

KINDS = {
    "local": (Option(flag="--python", metavar="PATH", meaning="interpreter"),),
    "inline": (),
    "ray": (
        Option(flag="--address", metavar="HOST:PORT", meaning="the cluster"),
        Option(flag="--nodes", metavar="N", meaning="nodes", read=count_or_range),
        Option(flag="--insecure", meaning="no token"),
        Option(flag="--runtime-env", metavar="JSON", meaning="environment", read=json_object),
    ),
}
STRATEGIES = {"none": (), "ddp": (), "fsdp": ()}


class Place:
    """A home folder and a project below it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.user = folder / "home" / ".config" / "jupyter_distrib" / "pools.toml"
        self.repository = folder / "home" / "project"
        self.notebooks = self.repository / "notebooks" / "deep"
        self.notebooks.mkdir(parents=True)
        self.user.parent.mkdir(parents=True)
        monkeypatch.setenv("HOME", str(folder / "home"))
        for name in ("XDG_CONFIG_HOME", "JUPYTER_DISTRIB_CONFIG", "JUPYTER_DISTRIB_POOL", "JUPYTER_DISTRIB_STRATEGY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(self.notebooks)
        monkeypatch.setattr(find_files, "LOOK_ROUND_S", 1e-9)  # nothing is remembered from one look to the next

    def write(self, path: Path, text: str) -> None:
        path.write_text(textwrap.dedent(text))

    def load(self) -> Settings:
        return config_files.load(KINDS, STRATEGIES)

    def refused(self) -> str:
        with pytest.raises(OptionsError) as caught:
            self.load()
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: Path) -> Place:
    return Place(tmp_path, monkeypatch)


LAB = """
    pool = "lab"

    [pools.lab]
    kind = "ray"
    address = "ray://head:10001"
    gpu_type = "A10"
    nodes = 2
    wait = 30
"""


def test_without_files_every_kind_is_a_pool(place: Place) -> None:
    found = place.load()
    assert list(found.pools) == ["local", "inline", "ray"]
    assert (found.pool, found.strategy_for(), found.origins(Options())) == ("local", "none", "")


def test_a_pool_of_the_users_file_has_its_options_and_defaults(place: Place) -> None:
    place.write(place.user, LAB)
    found = place.load()
    options = found.filled(Options())
    assert options.pool == "lab"
    assert options.pool_options == {"address": "ray://head:10001", "nodes": "2"}
    assert (options.gpu_type, options.wait_s, options.strategy) == ("A10", 30.0, "none")
    assert found.declared["lab"] == KINDS["ray"]


def test_the_pool_of_remote_functions_is_named_or_has_that_name(place: Place) -> None:
    assert place.load().remote_pool() is None
    place.write(place.user, '[pools.remote]\nkind = "ray"\n')
    assert place.load().remote_pool() == "remote"
    place.write(place.user, 'remote = "lab"\n[pools.lab]\nkind = "ray"\n[pools.remote]\nkind = "ray"\n')
    assert place.load().remote_pool() == "lab"
    place.write(place.user, 'remote = "lap"\n[pools.lab]\nkind = "ray"\n')
    assert "line 1: remote = 'lap' is not known: did you mean lab?" in place.refused()


def test_a_pool_names_the_one_that_it_falls_back_to(place: Place) -> None:
    text = '[pools.a]\nkind = "local"\nfallback = "{}"\n[pools.b]\nkind = "ray"\n'
    place.write(place.user, text.format("b"))
    assert [place.load().pools[name].fallback for name in ("a", "b", "local")] == ["b", "", ""]
    place.write(place.user, text.format("c"))
    assert "line 3: fallback = 'c' is not known" in place.refused()
    place.write(place.user, text.format("a"))
    assert "line 3: fallback = 'a' is the pool itself: name another one" in place.refused()


def test_a_pool_may_limit_what_its_cells_send(place: Place) -> None:
    place.write(place.user, '[pools.lab]\nkind = "local"\nmax_capture = "1GB"\n')
    settings = place.load()

    assert settings.filled(Options(pool="lab")).max_capture == 10**9
    assert settings.filled(Options(pool="lab", max_capture=5)).max_capture == 5


def test_a_pool_has_a_limit_for_values_that_were_sent_and_a_cell_another(place: Place) -> None:
    place.write(place.user, '[pools.lab]\nkind = "local"\ncache = "1GB"\n')
    settings = place.load()
    assert settings.filled(Options(pool="lab")).cache == 10**9
    assert settings.filled(Options(pool="lab", cache=0)).cache == 0
    assert settings.filled(Options(pool="local")).cache is None
    assert settings.filled(Options(pool="local")).max_capture is None


def test_the_cells_own_line_wins(place: Place) -> None:
    place.write(place.user, LAB + 'strategy = "ddp"\n')
    found = place.load()
    options = found.filled(Options(gpus=2, strategy="fsdp", pool_options={"nodes": "1"}))
    assert (options.gpus, options.gpu_type, options.strategy) == (2, None, "fsdp")
    assert options.pool_options == {"address": "ray://head:10001", "nodes": "1"}
    assert found.filled(Options(pool="local")).pool_options == {}


def test_the_projects_file_wins_over_the_users(place: Place) -> None:
    place.write(place.user, LAB + '\n[pools.mine]\nkind = "local"\n')
    place.write(place.repository / "jupyter_distrib.toml", 'strategy = "ddp"\npool = "mine"\n')
    found = place.load()
    assert (found.pool, found.strategy_for()) == ("mine", "ddp")
    assert "lab" in found.pools
    assert found.origins(Options()) == "pool mine and strategy ddp from ~/project/jupyter_distrib.toml"
    assert found.origins(Options(pool="local", strategy="none")) == ""


def test_a_project_ends_at_its_repository_and_at_home(place: Place) -> None:
    place.write(place.repository.parent / "jupyter_distrib.toml", 'strategy = "ddp"\n')
    assert place.load().strategy_for() == "ddp", "the home folder itself counts"
    (place.repository / ".git").mkdir()
    assert place.load().strategy_for() == "none"
    place.write(place.repository.parent.parent / "jupyter_distrib.toml", 'strategy = "ddp"\n')
    (place.repository / ".git").rmdir()
    (place.repository.parent / "jupyter_distrib.toml").unlink()
    assert place.load().strategy_for() == "none"


def test_a_folder_of_somebody_else_is_not_asked(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in /tmp may be anybody's."""
    place.write(place.repository / "jupyter_distrib.toml", 'strategy = "ddp"\n')
    monkeypatch.setattr(find_files.os, "getuid", lambda: 4711)
    assert place.load().strategy_for() == "none"


def test_a_folder_that_anybody_may_write_to_is_not_asked(place: Place) -> None:
    """/tmp above a folder of one's own; for root it is one's own too."""
    place.write(place.repository / "jupyter_distrib.toml", 'strategy = "ddp"\n')
    place.repository.chmod(0o1777)
    assert place.load().strategy_for() == "none"
    place.repository.chmod(0o755)
    assert place.load().strategy_for() == "ddp"


def other_owner(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let this file or folder, and no other, belong to somebody else."""
    stat = os.stat

    def as_seen(each: Any, **options: Any) -> Any:
        info = stat(each, **options)
        uid = info.st_uid + 1 if Path(each) == path else info.st_uid
        fields = {name: getattr(info, name) for name in ("st_mode", "st_gid", "st_size", "st_ino", "st_ctime_ns")}
        return SimpleNamespace(**fields, st_uid=uid)

    monkeypatch.setattr(find_files.os, "stat", as_seen)


def test_the_users_file_is_not_read_if_it_is_somebody_elses(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `su` without a login, which keeps XDG_CONFIG_HOME."""
    place.write(place.user, 'strategy = "ddp"\n')
    other_owner(monkeypatch, place.user)
    found = place.load()
    assert found.strategy_for() == "none"
    (told,) = found.ignored
    assert told == (
        f"{place.user} is not read, since it belongs to another user: if you want its pools, set "
        "JUPYTER_DISTRIB_CONFIG to it."
    )
    monkeypatch.setenv("JUPYTER_DISTRIB_CONFIG", str(place.user))
    assert place.load().strategy_for() == "ddp"


@pytest.mark.parametrize("mode", [0o666, 0o646])
def test_the_users_file_is_not_read_if_others_may_write_it(place: Place, mode: int) -> None:
    place.write(place.user, 'strategy = "ddp"\n')
    place.user.chmod(mode)
    found = place.load()
    assert found.strategy_for() == "none"
    assert found.ignored == (f"{place.user} is not read, since it can be written by every user: chmod go-w it.",)
    place.user.chmod(0o644)
    assert place.load().strategy_for() == "ddp"


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_belongs_to_somebody_else_is_not_read_and_that_is_said(
    place: Place, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = place.notebooks / "jupyter_distrib.toml"
    place.write(path, 'strategy = "ddp"\n')
    other_owner(monkeypatch, path if what == "file" else place.notebooks)
    found = place.load()
    assert found.strategy_for() == "none"
    who = "it" if what == "file" else "its folder"
    assert found.ignored == (f"{path} is not read, since {who} belongs to another user.",)


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        (0o666, "it can be written by every user"),
        (0o664, "it can be written by other users of its group"),
        (0o644, ""),
    ],
)
def test_a_file_that_others_may_write_is_not_read(
    place: Place, monkeypatch: pytest.MonkeyPatch, mode: int, told: str
) -> None:
    path = place.notebooks / "jupyter_distrib.toml"
    place.write(path, 'strategy = "ddp"\n')
    path.chmod(mode)
    monkeypatch.setattr(other_users, "is_private_group", lambda gid: False)
    found = place.load()
    assert found.strategy_for() == ("none" if told else "ddp")
    assert [text for text in found.ignored if told in text] == list(found.ignored)
    assert bool(found.ignored) is bool(told)


def test_a_group_of_the_user_alone_is_not_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place.notebooks / "jupyter_distrib.toml"
    place.write(path, 'strategy = "ddp"\n')
    path.chmod(0o664)
    monkeypatch.setattr(other_users, "is_private_group", lambda gid: True)
    assert place.load().strategy_for() == "ddp"


def test_a_nearer_file_that_is_not_read_does_not_let_one_above_it_count(place: Place) -> None:
    place.write(place.repository / "jupyter_distrib.toml", 'strategy = "fsdp"\n')
    place.write(place.notebooks / "jupyter_distrib.toml", 'strategy = "ddp"\n')
    (place.notebooks / "jupyter_distrib.toml").chmod(0o666)
    assert place.load().strategy_for() == "none"


# ---------------------------------------------------------------------------------------------------- programs, addresses


EVIL = '[pools.lab]\nkind = "local"\npython = "./env/bin/python"\n'


def test_a_relative_path_is_relative_to_the_file(place: Place) -> None:
    place.write(place.repository / "jupyter_distrib.toml", EVIL)
    assert place.load().pools["lab"].options == {"python": str(place.repository / "env/bin/python")}
    place.write(place.repository / "jupyter_distrib.toml", EVIL.replace("./env", "~/env"))
    assert place.load().pools["lab"].options == {"python": str(place.repository.parent / "env/bin/python")}


def project(place: Place, text: str) -> Settings:
    """The settings with this file of a project, which nobody has trusted."""
    place.write(place.repository / "jupyter_distrib.toml", text)
    return place.load()


def trust(settings: Settings) -> None:
    assert settings.waiting is not None
    find_files.trust(settings.waiting.path, settings.waiting.digest)


def test_a_program_that_a_projects_file_names_has_to_be_trusted(place: Place) -> None:
    path = place.repository / "jupyter_distrib.toml"
    found = project(place, EVIL)
    file = found.pools["lab"].project_file
    assert file is not None
    assert (file.path, file.shown) == (str(path), "~/project/jupyter_distrib.toml")
    assert file.sets == f"python = {place.repository}/env/bin/python"
    trust(found)
    assert place.load().pools["lab"].project_file is None
    changed = project(place, EVIL + "ranks = 3\n").pools["lab"].project_file
    assert changed is not None, "trust is for one content"
    assert changed.digest != file.digest


@pytest.mark.parametrize(
    ("table", "asks"),
    [
        ('kind = "ray"\naddress = "ray://evil:1"', "kind = ray and address = ray://evil:1"),
        ('kind = "ray"\ninsecure = true', "kind = ray and insecure"),
        ('kind = "ray"\nruntime_env = { pip = "x" }', 'kind = ray and runtime_env = {"pip": "x"}'),
        ('kind = "ray"', "kind = ray"),
        ('kind = "ray"\nranks = 64\nnodes = 8', "kind = ray and ranks = 64 and nodes = 8"),
        ('kind = "local"\nfallback = "ray"', "fallback = ray"),
        ('kind = "local"\nmax_capture = "1GB"', "max_capture = 1GB"),
        ('kind = "local"\nwait = 30', "wait = 30"),
        ('kind = "local"\nranks = 2\nstrategy = "ddp"', ""),
        ('kind = "local"\ngpus = 2', ""),
    ],
)
def test_a_new_pool_of_a_project_needs_trust_unless_it_is_some_ranks_here(place: Place, table: str, asks: str) -> None:
    file = project(place, f"[pools.lab]\n{table}\n").pools["lab"].project_file
    assert (file.sets if file is not None else "") == asks


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 4 cores and 6 GPUs."""
    monkeypatch.setattr(project_files.control_groups, "cores", lambda: 4)
    monkeypatch.setattr(project_files, "DEVICES", tmp_path / "dev")
    (tmp_path / "dev").mkdir()
    for name in (*(f"nvidia{number}" for number in range(6)), "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()


@pytest.mark.parametrize(
    ("number", "asks"),
    [
        ("ranks = 4", ""),
        ("ranks = 5", "ranks = 5 (more than this machine has)"),
        ('ranks = "100000"', "ranks = 100000 (more than this machine has)"),
        ("ranks = 0x186a0", "ranks = 100000 (more than this machine has)"),
        ("gpus = 6", ""),
        ("gpus = 7", "gpus = 7 (more than this machine has)"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_more_ranks_than_the_machine_has_need_trust(place: Place, number: str, asks: str) -> None:
    table = f'kind = "local"\n{number}\n'
    new = project(place, f'pool = "lab"\n[pools.lab]\n{table}')
    file = new.pools["lab"].project_file
    assert (file.sets if file is not None else "") == asks
    assert new.pool == ("local" if asks else "lab")
    built_in = project(place, f"[pools.local]\n{table}")
    assert (built_in.pools["local"].size.count is None) == bool(asks)
    if asks:
        trust(built_in)
    assert place.load().pools["local"].size.count is not None


def test_a_machine_with_one_core_has_two_ranks_as_every_cell_gets(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_files.control_groups, "cores", lambda: 1)
    assert project(place, '[pools.lab]\nkind = "local"\nranks = 2').pools["lab"].project_file is None
    assert project(place, '[pools.lab]\nkind = "local"\nranks = 3').pools["lab"].project_file is not None


def test_only_these_keys_options_and_kinds_of_pools_need_no_trust() -> None:
    """Whoever adds one has to decide that it is harmless in the hands of a stranger: the default is that it is not."""
    options = {option.name for option in (*OPTIONS, *(each for kind in base.kinds().values() for each in kind))}
    unasked = {option.name for kind in base.kinds().values() for option in (*OPTIONS, *kind) if option.unasked}
    assert unasked == {"gpus", "ranks", "strategy"}
    assert unasked < options
    assert {kind for kind in base.kinds() if base.capabilities_of(kind).unasked} == {"local", "inline"}
    assert not Option(flag="--new", meaning="").unasked
    assert not base.Capabilities().unasked
    pools = {**built_in(KINDS), "mine": NamedPool(name="mine", kind="local")}
    values: tuple[object, ...] = (0, 1, "x", "ray", [], ["x"], True, False)
    taken = {key.name for key in project_files.KEYS if any(key.unasked(value, pools) for value in values)}
    assert taken == {"strategy", "history", "pools"}
    assert not project_files.Key(name="new").unasked("", pools)
    assert [key.name for key in project_files.KEYS if key.unasked("mine", pools)] == [
        "pool",
        "remote",
        "reserved",
        "strategy",
        "pools",
    ]


OF_USER = """
    pool = "mine"
    track = ["tensorboard"]
    [pools.mine]
    kind = "local"
    ranks = 3
    [pools.costly]
    kind = "ray"
    address = "ray://head:10001"
    [pools.safe]
    kind = "local"
    fallback = "costly"
"""


@pytest.mark.parametrize(
    "line",
    [
        'pool = "costly"',
        'pool = "ray"',
        'pool = "safe"',
        'remote = "costly"',
        'track = ["mlflow"]',
        'compat = ["spark"]',
        "history = 1",
        "history = 1e9",
        "history_days = 0",
        'pool = "new"\n[pools.new]\nkind = "ray"',
        '[pools.mine]\nkind = "local"\nranks = 4',
        '[pools.mine]\nkind = "local"',
        '[pools.costly]\nkind = "ray"',
        '[pools.costly]\nkind = "local"',
        '[pools.local]\nkind = "local"\npython = "./evil"',
        '[pools.ray]\nkind = "ray"\naddress = "evil"',
        '[pools.safe]\nkind = "local"',
    ],
)
def test_what_a_project_may_not_set_leaves_the_users_own_and_is_reported(place: Place, line: str) -> None:
    place.write(place.user, OF_USER)
    before = place.load()
    found = project(place, line)

    kept = [replace(each, waiting=None, ignored=(), project="") for each in (before, found)]
    assert replace(kept[1], pools={name: kept[1].pools[name] for name in kept[0].pools}) == kept[0]
    (told,) = found.ignored
    assert told.startswith("~/project/jupyter_distrib.toml is not trusted, so this is not taken from it: ")
    assert told.endswith("If you trust this file, run %distributed_pool trust.")
    trust(found)
    after = place.load()
    assert after.waiting is None
    assert not after.ignored
    assert after != before, "now it is taken"


@pytest.mark.parametrize(
    "line", ['pool = "mine"', 'pool = "inline"', 'remote = "mine"', 'strategy = "ddp"', "history = 0"]
)
def test_what_a_project_may_set_is_taken_unasked(place: Place, line: str) -> None:
    place.write(place.user, OF_USER)
    key = line.partition(" ")[0].replace("history", "project_history")
    found = project(place, line)
    assert found.ignored == ()
    assert f"{getattr(found, key)}" == line.partition("= ")[2].strip('"').replace("0", "0.0")


def test_the_users_own_file_is_trusted_also_when_a_project_says_the_same(place: Place) -> None:
    place.write(place.user, LAB)
    before = place.load()
    assert before.pools["lab"].project_file is None
    same = project(place, LAB)
    assert same.pools == before.pools
    assert (same.pool, same.waiting, same.ignored) == ("lab", None, ())
    other = project(place, LAB.replace("head", "evil"))
    assert other.pools == before.pools
    assert other.waiting is not None


def test_a_project_that_saves_nothing_keeps_only_its_own_runs_out(place: Place) -> None:
    place.write(place.user, "history = 20")
    found = project(place, "history = 0")
    assert (found.history, found.saves_runs) == (20, False)
    trust(found := project(place, "history = 3\nhistory_days = 7"))
    assert found.saves_runs
    found = place.load()
    assert (found.history, found.history_days) == (20, 90), "those of all runs"
    assert (found.project_history, found.project_history_days, found.project) == (3, 7, str(place.repository))


def test_a_damaged_list_of_trusted_files_means_that_nothing_is_trusted(place: Place, state: Path) -> None:
    trust(project(place, EVIL))
    kept = state / "jupyter_distrib" / "trusted_files.json"
    for damage in (b"\xff", b"[1]", b"[" * 5000, b'{"x": 1}', b"null"):
        kept.write_bytes(damage)
        assert place.load().waiting is not None
    kept.unlink()
    os.mkfifo(kept)
    assert place.load().waiting is not None
    trust(place.load())
    assert place.load().waiting is None


# ---------------------------------------------------------------------------------------------------- files that are none


@pytest.mark.parametrize("what", ["fifo", "folder", "link", "dangling", "huge"])
def test_a_projects_file_that_is_not_a_small_file_is_not_read(place: Place, what: str) -> None:
    path = place.notebooks / "jupyter_distrib.toml"
    elsewhere = place.repository / "elsewhere.toml"
    place.write(elsewhere, 'strategy = "ddp"')
    match what:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link" | "dangling":
            path.symlink_to(elsewhere if what == "link" else place.repository / "nowhere")
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
    found = place.load()
    assert found.strategy_for() == "none"
    (told,) = found.ignored
    assert told.startswith(f"{path} is not read, since it is {'a link' if path.is_symlink() else ''}")


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000, "a = " + "9" * 5000, 'a = "\\ud800"', "[" * 5000, "\0", "a." * 5000]
)
def test_nonsense_in_a_file_is_one_sentence(place: Place, text: str) -> None:
    place.write(place.notebooks / "jupyter_distrib.toml", text)
    assert place.refused().startswith("jupyter_distrib.toml")


@pytest.mark.parametrize("dots", [".".join("a" * 20_000) + " = 1", "[" + ".".join("a" * 20_000) + "]", ". " * 400])
def test_a_key_of_very_many_parts_is_refused_at_once(place: Place, dots: str) -> None:
    place.write(place.repository / "jupyter_distrib.toml", f"history = 0\n{dots}\n")

    assert place.refused().endswith("jupyter_distrib.toml, line 2: there are more than 300 dots in it: split the line.")


def test_control_characters_of_a_file_do_not_reach_the_screen(place: Place) -> None:
    place.write(place.notebooks / "jupyter_distrib.toml", '"\\u001b[2J" = 1')
    assert "\x1b" not in place.refused()
    place.write(place.notebooks / "jupyter_distrib.toml", '[pools.lab]\nkind = "ray"\naddress = "\\u001b[2J"')
    file = place.load().pools["lab"].project_file
    assert file is not None
    assert "\x1b" not in file.sets


@pytest.mark.parametrize("trouble", ["", "track = ['mlflow']", "pool = 'x"])
def test_control_characters_of_a_folder_do_not_reach_the_screen(
    place: Place, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Whoever has made an archive has named its folders."""
    folder = place.notebooks / "e\x1b[2Jv\nil\u202e"
    (folder / "deep").mkdir(parents=True)
    place.write(folder / "jupyter_distrib.toml", trouble)
    monkeypatch.chdir(folder / "deep")
    if not trouble:
        (folder / "jupyter_distrib.toml").chmod(0o666)
    told = place.refused() if trouble == "pool = 'x" else place.load().ignored[0]
    assert "/e?[2Jv?il?/jupyter_distrib.toml" in told
    assert told.isprintable()


def test_a_folder_for_the_group_does_not_hide_the_projects_file_above_it(place: Place) -> None:
    place.write(place.repository / "jupyter_distrib.toml", 'strategy = "ddp"\n')
    place.notebooks.chmod(0o777)
    place.notebooks.parent.chmod(0o755)
    assert place.load().strategy_for() == "ddp"
    place.notebooks.parent.chmod(0o777)
    assert place.load().strategy_for() == "none"


def test_a_file_of_somebody_else_above_the_notebook_is_reported(place: Place) -> None:
    """As /tmp/jupyter_distrib.toml, for a notebook in /tmp/me."""
    place.write(place.repository / "jupyter_distrib.toml", 'strategy = "ddp"\n')
    os.chown(place.repository / "jupyter_distrib.toml", 12345, -1)
    place.repository.chmod(0o1777)
    found = place.load()
    assert found.strategy_for() == "none"
    assert found.ignored == (f"{place.repository}/jupyter_distrib.toml is not read, since it belongs to another user.",)


def test_the_environment_wins_over_files(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write(place.user, LAB)
    monkeypatch.setenv("JUPYTER_DISTRIB_POOL", "local")
    monkeypatch.setenv("JUPYTER_DISTRIB_STRATEGY", "fsdp")
    found = place.load()
    assert (found.pool, found.strategy_for()) == ("local", "fsdp")
    assert found.origins(Options()) == (
        "pool local from JUPYTER_DISTRIB_POOL, strategy fsdp from JUPYTER_DISTRIB_STRATEGY"
    )
    monkeypatch.setenv("JUPYTER_DISTRIB_POOL", "labb")
    assert place.refused() == "JUPYTER_DISTRIB_POOL is 'labb', which is not known: choose local, inline, ray or lab"


def test_another_file_can_be_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    other = place.repository / "other.toml"
    monkeypatch.setenv("JUPYTER_DISTRIB_CONFIG", str(other))
    assert place.refused() == f"JUPYTER_DISTRIB_CONFIG names {other}, and there is no such file"
    place.write(other, 'strategy = "fsdp"')
    place.write(place.user, 'strategy = "ddp"')
    assert place.load().strategy_for() == "fsdp"


def test_a_pools_own_strategy_is_for_that_pool(place: Place) -> None:
    place.write(place.user, 'strategy = "ddp"\n[pools.big]\nkind = "local"\nstrategy = "fsdp"\nranks = 8')
    found = place.load()
    assert found.filled(Options()).strategy == "ddp"
    assert (found.filled(Options(pool="big")).strategy, found.filled(Options(pool="big")).ranks) == ("fsdp", 8)
    assert found.filled(Options(pool="big", gpus=2)).ranks is None
    assert found.filled(Options(pool="big", on=(0,))).ranks is None
    assert found.origins(Options(pool="big")) == "strategy fsdp from ~/.config/jupyter_distrib/pools.toml"


def test_a_file_that_cannot_be_reached_is_none(place: Place) -> None:
    place.user.parent.rmdir()
    place.user.parent.symlink_to(place.user.parent)
    assert list(place.load().pools) == ["local", "inline", "ray"]


def test_a_changed_file_is_read_again(place: Place) -> None:
    place.write(place.user, 'strategy = "ddp"')
    assert place.load().strategy_for() == "ddp"
    place.write(place.user, 'strategy = "fsdp"')
    assert place.load().strategy_for() == "fsdp"
    place.user.unlink()
    assert place.load().strategy_for() == "none"


def test_another_file_of_the_same_size_and_time_is_read(place: Place) -> None:
    """As an archive or a copy with times leaves it: what a form adds a pool to is what was looked at."""
    file, other = place.notebooks / "jupyter_distrib.toml", place.notebooks / "other"
    place.write(file, "strategy = 'ddp'  ")
    place.write(other, "track = ['mlflow']")
    assert file.stat().st_size == other.stat().st_size
    assert place.load().waiting is None
    os.utime(other, ns=(0, file.stat().st_mtime_ns))
    other.replace(file)
    assert place.load().waiting is not None


def test_values_are_read_as_on_a_line(place: Place) -> None:
    place.write(
        place.user,
        """
        [pools.lab]
        kind = "ray"
        insecure = true
        runtime_env = { pip = ["emoji"] }
        [pools.safe]
        kind = "ray"
        insecure = false
        """,
    )
    found = place.load()
    assert found.pools["lab"].options == {"insecure": "", "runtime_env": '{"pip": ["emoji"]}'}
    assert found.pools["safe"].options == {}


FILE = "~/.config/jupyter_distrib/pools.toml"
SLIPS = [
    ('pool = "x\n', f"{FILE}, line 1: not valid TOML: Illegal character '\\n'"),
    ('pol = "x"', f"{FILE}, line 1: unknown option pol: did you mean pool?"),
    ('\npool = "lba"\n[pools.lab]\nkind = "ray"', f"{FILE}, line 2: pool = 'lba' is not known: did you mean lab?"),
    ('strategy = "dpp"', f"{FILE}, line 1: strategy = 'dpp' is not known: did you mean ddp?"),
    ("[pools.lab]\nranks = 2", f'{FILE}, line 1: [pools.lab] has no kind: write kind = "local" or "ray"'),
    ('[pools.lab]\nkind = "rya"', f"{FILE}, line 2: kind = 'rya' is not known: did you mean ray?"),
    ('[pools.lab]\nkind = "inline"', f"{FILE}, line 2: kind = 'inline' is not known: choose local or ray"),
    (
        '[pools.lab]\nkind = "ray"\nadress = "x"',
        f"{FILE}, line 3: unknown option adress: did you mean address?",
    ),
    (
        '[pools.lab]\nkind = "local"\naddress = "x"',
        f'{FILE}, line 3: address is an option of kind = "ray": choose that, or leave address out',
    ),
    (
        '[pools.lab]\nkind = "ray"\nnodes = "two"',
        f"{FILE}, line 3: nodes must be a whole number, at least 1; got 'two'",
    ),
    ('[pools.lab]\nkind = "ray"\ngpus = 0', f"{FILE}, line 3: gpus must be a whole number, at least 1; got '0'"),
    (
        '[pools.lab]\nkind = "ray"\ngpus = 1\nranks = 2',
        f"{FILE}, line 4: gpus and ranks exclude each other: leave one out",
    ),
    (
        '[pools.lab]\nkind = "ray"\nranks = "2:4"\nnodes = "1:2"',
        f"{FILE}, line 4: nodes = '1:2' and ranks = '2:4' exclude each other: give ranks the number of ranks on all 2",
    ),
    (
        '[pools.lab]\nkind = "ray"\nnodes = "1:2"\ngpus = 3',
        f"{FILE}, line 3: nodes = '1:2' puts the same number of ranks on each node, so gpus must be a multiple of 2",
    ),
    ('[pools."my lab"]\nkind = "ray"', f"{FILE}, line 1: 'my lab' cannot name a pool: use letters, digits, _, . and -"),
    ('[pools.ray]\nkind = "local"', f"{FILE}, line 1: ray is itself a kind of pool: choose another name for a pool of"),
    (
        '\n[pool.lab]\nkind = "ray"',
        f"{FILE}, line 2: pool must be one name; got a table: write [pools.NAME] for each pool",
    ),
    ("[strategy.ddp]\nx = 1", f"{FILE}, line 1: strategy must be one name; got a table"),
    (f"history = {2**64}", f"{FILE}: a whole number in it is longer than 64 bits"),
    ('pools = "x"', f"{FILE}, line 1: write a table [pools.NAME] for each pool"),
    ("[pools]\nlab = 3", f"{FILE}, line 2: write a table [pools.lab]"),
]


@pytest.mark.parametrize(("text", "message"), SLIPS, ids=[message[len(FILE) + 2 : 60] for _, message in SLIPS])
def test_a_slip_is_one_sentence_with_file_and_line(place: Place, text: str, message: str) -> None:
    place.user.write_text(text)
    assert place.refused().startswith(message)


def test_a_file_that_cannot_be_read_is_said(place: Place) -> None:
    place.user.write_bytes(b"\n# caf\xe9\n")
    assert place.refused().startswith(f"{FILE} cannot be read: line 2 is not text in UTF-8")


def test_the_mark_that_windows_puts_before_a_text_is_no_error(place: Place) -> None:
    place.user.write_text("\ufeffhistory = 7\n", "utf-8")
    assert place.load().history == 7


_LONG = f"0x{'f' * 5000}"
_DEEP = "track = " + "{" + ".".join("a" * 60) + " = 1}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"history = {_LONG}", "longer than 64 bits"),
        (f"pool = {_LONG}", "longer than 64 bits"),
        (f"track = [[{_LONG}]]", "longer than 64 bits"),
        (f"track = {{a = {_LONG}}}", "longer than 64 bits"),
        (f"[pools.a]\nkind = {_LONG}", "longer than 64 bits"),
        (f"[pools.a]\nkind = 'local'\npython = {_LONG}", "longer than 64 bits"),
        (_DEEP, "more than 50 tables"),
        (f"[pools.a]\nkind = 'local'\npython.{'.'.join('a' * 60)} = 1", "more than 50 tables"),
    ],
)
def test_numbers_and_tables_that_cannot_be_shown_are_refused_in_a_sentence(place: Place, text: str, told: str) -> None:
    (place.repository / find_files.PROJECT_FILE).write_text(text)

    assert told in place.refused()


@pytest.mark.parametrize(
    "line", ["[" + " " * 900_000, f"[a{' ' * 900_000}b]", "[" * 900_000], ids=["one", "two", "three"]
)
def test_the_line_of_a_slip_is_found_soon_beside_any_other_line(place: Place, line: str) -> None:
    text = f"[pools.a]\nkind = 'local'\npython = '''\n{line}\n'''\n[pools . 'b']\nkind = 'local'\n 'wrong' = 1\n"
    (place.repository / find_files.PROJECT_FILE).write_text(text)

    assert "line 8: unknown option wrong" in place.refused()
