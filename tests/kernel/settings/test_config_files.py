"""Pools and defaults from TOML files and the environment: which one wins, and what is said of a slip."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.settings import config_files
from jupyter_distrib.kernel.settings.cell_options import Options
from jupyter_distrib.kernel.settings.config_files import Settings
from jupyter_distrib.options import Option, count

KINDS = {
    "local": (Option(flag="--python", metavar="PATH", meaning="interpreter"),),
    "inline": (),
    "ray": (
        Option(flag="--address", metavar="HOST:PORT", meaning="the cluster"),
        Option(flag="--nodes", metavar="N", meaning="nodes", read=count),
        Option(flag="--insecure", meaning="no token"),
        Option(flag="--runtime-env", metavar="JSON", meaning="environment"),
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
        monkeypatch.setattr(config_files, "LOOK_ROUND_S", 1e-9)  # nothing is remembered from one look to the next

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
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
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
    monkeypatch.setattr(config_files.os, "getuid", lambda: 4711)
    assert place.load().strategy_for() == "none"


def test_a_folder_that_anybody_may_write_to_is_not_asked(place: Place) -> None:
    """/tmp above a folder of one's own; for root it is one's own too."""
    place.write(place.repository / "jupyter_distrib.toml", 'strategy = "ddp"\n')
    place.repository.chmod(0o1777)
    assert place.load().strategy_for() == "none"
    place.repository.chmod(0o755)
    assert place.load().strategy_for() == "ddp"


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
    ('[pools.lab]\nkind = "ray"\nnodes = "two"', f"{FILE}, line 3: nodes wants a whole number, at least 1; got 'two'"),
    ('[pools.lab]\nkind = "ray"\ngpus = 0', f"{FILE}, line 3: gpus wants a whole number, at least 1; got '0'"),
    (
        '[pools.lab]\nkind = "ray"\ngpus = 1\nranks = 2',
        f"{FILE}, line 4: gpus and ranks exclude each other: leave one out",
    ),
    ('[pools."my lab"]\nkind = "ray"', f"{FILE}, line 1: 'my lab' cannot name a pool: use letters, digits, _, . and -"),
    ('[pools.ray]\nkind = "local"', f"{FILE}, line 1: ray is a kind of pool itself: choose another name for one of"),
    ('pools = "x"', f"{FILE}, line 1: write a table [pools.NAME] for each pool"),
    ("[pools]\nlab = 3", f"{FILE}, line 2: write a table [pools.lab]"),
]


@pytest.mark.parametrize(("text", "message"), SLIPS, ids=[message[len(FILE) + 2 : 60] for _, message in SLIPS])
def test_a_slip_is_one_sentence_with_file_and_line(place: Place, text: str, message: str) -> None:
    place.user.write_text(text)
    assert place.refused().startswith(message)


def test_a_file_that_cannot_be_read_is_said(place: Place) -> None:
    place.user.write_bytes(b"\xff\xfe")
    assert place.refused().startswith(f"{FILE} cannot be read: 'utf-8' codec")
