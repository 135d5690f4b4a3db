"""The options: text or keywords in, `Options` or one exact sentence out."""

import dataclasses
import pickle
import re
import subprocess
import sys
from enum import Enum

import pytest

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.notebook.magic_requests import (
    LogsRequest,
    PoolRequest,
    StatusRequest,
    parse_attach,
    parse_logs,
    parse_pool,
    parse_status,
)
from jupyter_distrib.kernel.settings import available
from jupyter_distrib.kernel.settings.cell_options import MAGIC, OPTIONS, GroupSize, Options, parse_line
from jupyter_distrib.kernel.settings.help import complete, help_text, markdown_tables
from jupyter_distrib.kernel.settings.keywords import from_keywords
from jupyter_distrib.kernel.settings.written_options import to_line
from jupyter_distrib.options import Option, count, parse_arguments


class Named(Enum):
    """Options of another library, as a configuration gives them."""

    DDP = "ddp"
    KEPT = "a"


BATCH = Option(flag="--batch", metavar="N", meaning="samples a step | over all ranks", read=count, default="as loaded")
STRATEGIES = {
    "none": (),
    "ddp": (BATCH, Option(flag="--static-graph", meaning="the graph is the same in every step")),
    "fsdp": (
        BATCH,
        Option(flag="--fsdp-unit", metavar="CLASS", meaning="shard each of these"),
        Option(flag="--precision", metavar="P", meaning="numbers of the forward pass", choices=("bf16", "fp32")),
    ),
}
POOLS = {"local": (), "ray": (Option(flag="--address", metavar="HOST:PORT", meaning="the cluster's head"),)}
FLAGS = [option.flag for option in OPTIONS]


def line(text: str) -> Options:
    return parse_line(text, strategies=STRATEGIES, pools=POOLS)


def call(**keywords: object) -> Options:
    return from_keywords(keywords, strategies=STRATEGIES, pools=POOLS)


def completed(text: str) -> list[str]:
    return complete(text, strategies=STRATEGIES, pools=POOLS)


# ------------------------------------------------------------------------------------------------ what is accepted

ACCEPTED = [
    ("", {}, Options()),
    ("--gpus 2", {"gpus": 2}, Options(gpus=2)),
    ("--gpus=2", {"gpus": "2"}, Options(gpus=2)),
    ("--ranks 4", {"ranks": 4, "gpus": None}, Options(ranks=4)),
    ("--profile", {"profile": True}, Options(profile=8)),
    ("--profile --detach", {"profile": 8, "detach": True}, Options(profile=8, detach=True)),
    ("--profile=20", {"profile": 20}, Options(profile=20)),
    ("--profile 20", {"profile": "20"}, Options(profile=20)),
    ("--strategy ddp --pool ray", {"strategy": "ddp", "pool": "ray"}, Options(strategy="ddp", pool="ray")),
    ("--out results", {"out": "results"}, Options(out="results")),
    ("--keep model,optimizer", {"keep": ["model", "optimizer"]}, Options(keep=("model", "optimizer"))),
    ("--keep a --keep 'b, a'", {"keep": "a,b"}, Options(keep=("a", "b"))),
    ("--with helper", {"with_": ("helper",)}, Options(with_=("helper",))),
    ("--on 2-3,0", {"on": [3, 0, 2]}, Options(on=(0, 2, 3))),
    ("--on 0", {"on": 0}, Options(on=(0,))),
    ("--on 1-2", {"on": range(1, 3)}, Options(on=(1, 2))),
    ("--timeout 1.5", {"timeout_s": 1.5}, Options(timeout_s=1.5)),
    ("--detach --fresh", {"detach": True, "fresh": True}, Options(detach=True, fresh=True)),
    ("--detach --timeout 60", {"detach": True, "timeout_s": 60, "fresh": False}, Options(detach=True, timeout_s=60.0)),
    ("--max-capture 1.5GB", {"max_capture": "1.5 gb"}, Options(max_capture=1_500_000_000)),
    ("--cache 0", {"cache": 0}, Options(cache=0)),
    ("--cache 2GB", {"cache": "2GB"}, Options(cache=2_000_000_000)),
    ("--max-capture 4MiB", {"max_capture": 4194304}, Options(max_capture=4_194_304)),
    ("--explain --on 0", {"explain": True, "on": "0"}, Options(explain=True, on=(0,))),
    ("--env A=1 --env=B=x=y", {"env": {"A": 1, "B": "x=y"}}, Options(env={"A": "1", "B": "x=y"})),
    ("--env C=", {"env": {"C": ""}}, Options(env={"C": ""})),
    ("--env 'A=two words'", {"env": ["A=two words"]}, Options(env={"A": "two words"})),
    (
        "--batch 8 --strategy ddp",
        {"batch": 8, "strategy": "ddp"},
        Options(strategy="ddp", strategy_options={"batch": "8"}),
    ),
    (
        "--strategy=ddp --static-graph",
        {"strategy": "ddp", "static_graph": True},
        Options(strategy="ddp", strategy_options={"static_graph": ""}),
    ),
    (
        "--strategy fsdp --fsdp-unit 'my Block' --precision bf16",
        {"strategy": "fsdp", "fsdp_unit": "my Block", "precision": "bf16"},
        Options(strategy="fsdp", strategy_options={"fsdp_unit": "my Block", "precision": "bf16"}),
    ),
    ("--strategy ddp --keep a", {"strategy": Named.DDP, "keep": [Named.KEPT]}, Options(strategy="ddp", keep=("a",))),
    (
        "--pool ray --address=-h:1",
        {"pool": "ray", "address": "-h:1"},
        Options(pool="ray", pool_options={"address": "-h:1"}),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "keywords", "options"), ACCEPTED)
def test_a_line_becomes_options(text: str, keywords: dict[str, object], options: Options) -> None:
    assert line(text) == options


@pytest.mark.parametrize(("text", "keywords", "options"), ACCEPTED)
def test_keywords_become_the_same_options(text: str, keywords: dict[str, object], options: Options) -> None:
    assert call(**keywords) == options


@pytest.mark.parametrize(("text", "keywords", "options"), ACCEPTED)
def test_options_become_a_line_that_reads_as_them(text: str, keywords: dict[str, object], options: Options) -> None:
    written = to_line(options)
    assert written.startswith(MAGIC)
    assert line(written.removeprefix(MAGIC)) == options


def test_the_written_line_looks_as_a_person_would_type_it() -> None:
    options = call(gpus=2, strategy="ddp", on=[0, 1], timeout_s=30.0, env={"A": "it's"}, detach=True, batch=8)
    expected = """%%distributed --gpus 2 --strategy ddp --on 0,1 --timeout 30 --detach --env 'A=it'"'"'s' --batch 8"""
    assert to_line(options) == expected


def test_a_value_with_a_line_break_cannot_be_written_as_a_line() -> None:
    with pytest.raises(OptionsError, match=r"^a magic line cannot hold a value with a line break: set it in the cell"):
        to_line(Options(env={"A": "1\n2"}))


@pytest.mark.parametrize("text", ["--gpus 2 # don't \"ask", "--gpus 2 #comment --ranks 3", "  --gpus   2\n"])
def test_a_comment_or_blank_may_end_the_line(text: str) -> None:
    assert line(text) == Options(gpus=2)


def test_a_hash_inside_a_word_or_quotes_is_not_a_comment() -> None:
    assert line("--env COLOR=#fff --env '#A=#'") == Options(env={"COLOR": "#fff", "#A": "#"})


def test_a_line_of_a_comment_only_asks_for_nothing() -> None:
    assert line("# four ranks would be nice") == Options()


def test_the_default_strategy_and_pool_have_their_own_options_too() -> None:
    own = Option(flag="--cores", metavar="N", meaning="for each rank", read=count)
    assert parse_line("--cores 3", strategies={"none": ()}, pools={"local": (own,)}).pool_options == {"cores": "3"}


# ------------------------------------------------------------------------------------------------ what is refused

EVERY = ", ".join(FLAGS[:-1]) + " or " + FLAGS[-1]
REFUSED_LINES = [
    ("--gpu 2", "unknown option --gpu: did you mean --gpus?"),
    ("--GPUS 2", "unknown option --GPUS: did you mean --gpus?"),
    ("-g 2", "unknown option -g: did you mean --gpus?"),
    ("\N{EM DASH}gpus 2", "unknown option \N{EM DASH}gpus: did you mean --gpus?"),
    ("--stratgy=ddp", "unknown option --stratgy: did you mean --strategy?"),
    ("--timeout_s 3", "unknown option --timeout_s: did you mean --timeout?"),
    ("--nproc_per_node 2", "unknown option --nproc_per_node: did you mean --gpus?"),
    ("--gpus 8:2", "--gpus has the range 8:2 backwards: write 2:8"),
    ("--ranks 0:4", "--ranks must be a whole number, at least 1, or a range such as 2:8; got '0:4'"),
    ("--ranks 2:x", "--ranks must be a whole number, at least 1, or a range such as 2:8; got '2:x'"),
    ("--ranks :8", "--ranks must be a whole number, at least 1, or a range such as 2:8; got ':8'"),
    ("--ranks 2:8:0", "--ranks must be a whole number, at least 1, or a range such as 2:8; got '2:8:0'"),
    ("--gpus 2:7:2", "--gpus has steps of 2, so 2 and 7 must be multiples of 2"),
    ("--gpus 2:8 --min-ranks 2 --max-restarts 1", "--min-ranks and --gpus 2:8 exclude each other: 2 is the minimum already"),
    ("--ranks 2:8 --on 0", "--on and --ranks 2:8 exclude each other: the numbers of the ranks depend on how many there are"),
    ("--ranks 2:8 --keep a", "--keep and --ranks 2:8 exclude each other: more ranks are new processes, without it"),
    ("--ranks 2:8 --sweep a=[1]", "--sweep and --ranks 2:8 exclude each other: its runs share the pool, so give each a fixed number"),
    ("--min-ranks 1", "--min-ranks needs --max-restarts, the maximum number of restarts"),
    ("--ranks 2 --max-restarts 1 --min-ranks 3", "--min-ranks 3 is more than the 2 ranks of the cell"),
    ("--ranks 2 --max-restarts 1 --min-ranks 1 --on 0", "--min-ranks and --on exclude each other: fewer ranks would be numbered differently"),
    ("--restart-on error", "--restart-on needs --max-restarts, the maximum number of restarts"),
    ("--max-restarts 2 --restart-on all", "--restart-on all is not known: choose lost or error"),
    ("--max-restarts 0", "--max-restarts must be a whole number, at least 1; got '0'"),
    ("--async", "unknown option --async: did you mean --detach?"),
    ("--xyz", f"unknown option --xyz: choose {EVERY}"),
    ("--", f"unknown option --: choose {EVERY}"),
    ("--gpus", "--gpus needs a value: write --gpus N"),
    ("--gpus=", "--gpus needs a value: write --gpus N"),
    ("--gpus # 2", "--gpus needs a value: write --gpus N"),
    ("--out --detach", "--out needs a value: write --out NAME"),
    ("--strategy", "--strategy needs a value: write --strategy NAME"),
    ("--on ''", "--on needs a value: write --on RANKS"),
    ("--gpus two", "--gpus must be a whole number, at least 1; got 'two'"),
    ("--gpus 0", "--gpus must be a whole number, at least 1; got '0'"),
    ("--ranks -1", "--ranks must be a whole number, at least 1; got '-1'"),
    ("--ranks 1_0", "--ranks must be a whole number, at least 1; got '1_0'"),
    ("--timeout 0", "--timeout must be a number of seconds above 0; got '0'"),
    ("--timeout -3", "--timeout must be a number of seconds above 0; got '-3'"),
    ("--timeout 5m", "--timeout must be a number of seconds above 0; got '5m'"),
    ("--timeout inf", "--timeout must be a number of seconds above 0; got 'inf'"),
    ("--timeout nan", "--timeout must be a number of seconds above 0; got 'nan'"),
    ("--on 0,,2", "--on must be ranks such as 0,2-3; got '0,,2'"),
    ("--on first", "--on must be ranks such as 0,2-3; got 'first'"),
    ("--on -1", "--on must be ranks such as 0,2-3; got '-1'"),
    ("--on 3-1", "--on has the range 3-1 backwards: write 1-3"),
    ("--on 1,0-2", "--on names rank 1 twice: name it once"),
    ("--on 0-999999999", "--on names rank 999999999; no rank is above 65535"),
    ("--on 2 --ranks 2", "--on names rank 2, but 2 ranks count from 0 to 1"),
    ("--keep a, b", "--keep must be names of variables, joined by commas without spaces; got 'a,'"),
    ("--keep model.weight", "--keep must be names of variables, joined by commas without spaces; got 'model.weight'"),
    ("--with class", "--with must be names of variables; 'class' is a keyword of Python"),
    ("--out a,b", "--out must be the name of one variable; got 'a,b'"),
    ("--out None", "--out must be names of variables; 'None' is a keyword of Python"),
    ("--env A", "--env must be K=V, the name of a variable and its value; got 'A'"),
    ("--env =1", "--env must be K=V, the name of a variable and its value; got '=1'"),
    ("--env A=1 --env A=2", "--env sets A twice: keep one of them"),
    ("--env RANK=7", "--env cannot set RANK, which jupyter_distrib sets on each rank: leave it out"),
    (
        "--env CUDA_VISIBLE_DEVICES=9",
        (
            "--env cannot set CUDA_VISIBLE_DEVICES, which jupyter_distrib sets on each rank: "
            "choose GPUs with %env CUDA_VISIBLE_DEVICES=... in the notebook"
        ),
    ),
    ("--gpus 2 --gpus 3", "--gpus is given twice: keep one of them"),
    ("--detach --detach", "--detach is given twice: keep one of them"),
    ("--strategy none --strategy ddp", "--strategy is given twice: keep one of them"),
    ("--detach=yes", "--detach takes no value: write --detach alone"),
    ("--out 'a", "a quote is never closed, close it: \"'a\""),
    ("--out a\\", r"a backslash ends the line, remove it: 'a\\'"),
    ("4", "'4' stands alone: did you mean --gpus 4?"),
    ("gpus 4", "'gpus' stands alone: did you mean --gpus?"),
    ("ddp", "'ddp' stands alone: did you mean --strategy ddp?"),
    ("ray", "'ray' stands alone: did you mean --pool ray?"),
    ("--gpus 2 4", "'4' stands alone: an option begins with --, and a value with spaces needs quotes"),
    ("--strategy dpp", "--strategy dpp is not known: did you mean ddp?"),
    ("--batch 8 --strategy DDP", "--strategy DDP is not known: did you mean ddp?"),
    ("--strategy zero", "--strategy zero is not known: choose none, ddp or fsdp"),
    ("--pool rya", "--pool rya is not known: did you mean ray?"),
    (
        "--fsdp-unit B --strategy ddp",
        "--fsdp-unit is an option of --strategy fsdp: choose that, or leave --fsdp-unit out",
    ),
    ("--batch 8", "--batch is an option of --strategy ddp or --strategy fsdp: choose that, or leave --batch out"),
    ("--address a", "--address is an option of --pool ray: choose that, or leave --address out"),
    ("--strategy ddp --batch x", "--batch must be a whole number, at least 1; got 'x'"),
    ("--strategy ddp --batch 1 --batch 2", "--batch is given twice: keep one of them"),
    ("--strategy fsdp --precision bf61", "--precision bf61 is not known: did you mean bf16?"),
    (
        "--gpus 2 --ranks 2",
        "--gpus and --ranks exclude each other: --gpus has one GPU for each rank, --ranks has CPU ranks",
    ),
    ("--on 0 --fresh", "--on and --fresh exclude each other: new processes hold no kept values, leave one out"),
    ("--explain --dry-run", "--explain and --dry-run exclude each other: leave one out"),
    ("--out rank", "--out rank would hide the rank that every cell has on its ranks: choose another name"),
    ("--out a --keep a", "--out and --keep both bind a: choose another name for one"),
]  # fmt: skip


def test_the_whole_environment_of_the_notebook_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert line("--env MASTER_ADDR=localhost").env == {"MASTER_ADDR": "localhost"}
    with pytest.raises(OptionsError, match="cannot set MASTER_ADDR"):
        line("--env MASTER_ADDR=other")


@pytest.mark.parametrize(("text", "message"), REFUSED_LINES)
def test_a_wrong_line_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(OptionsError) as caught:
        line(text)
    assert str(caught.value) == message


REFUSED_KEYWORDS = [
    ({"gpu": 2}, "unknown option gpu: did you mean gpus?"),
    ({"timeout": 2}, "unknown option timeout: did you mean timeout_s?"),
    ({"gpus": 0}, "gpus must be a whole number, at least 1; got '0'"),
    ({"gpus": True}, "gpus must be a whole number, at least 1; got 'True'"),
    ({"gpus": 2.5}, "gpus must be a whole number, at least 1; got '2.5'"),
    ({"timeout_s": "x" * 99}, f"timeout_s must be a number of seconds above 0; got '{'x' * 57}...'"),
    ({"on": []}, "on needs a value: write on='RANKS'"),
    ({"on": [0, 0]}, "on names rank 0 twice: name it once"),
    ({"out": ""}, "out needs a value: write out='NAME'"),
    ({"keep": ["a b"]}, "keep must be names of variables, joined by commas without spaces; got 'a b'"),
    ({"env": {"A=B": "1"}}, "env must have a string for each name; got 'A=B: 1'"),
    ({"env": {"A": None}}, "env must have a string for each name; got 'A: None'"),
    ({"env": {"": "1"}}, "env must be K=V, the name of a variable and its value; got '=1'"),
    ({"detach": "yes"}, "detach must be True or False; got 'yes'"),
    ({"strategy": "dpp"}, "strategy='dpp' is not known: did you mean ddp?"),
    (
        {"batch": 8, "strategy": "none"},
        "batch is an option of strategy='ddp' or strategy='fsdp': choose that, or leave batch out",
    ),
    (
        {"gpus": 1, "ranks": 1},
        "gpus and ranks exclude each other: gpus has one GPU for each rank, ranks has CPU ranks",
    ),
    ({"on": 0, "fresh": True}, "on and fresh exclude each other: new processes hold no kept values, leave one out"),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "message"), REFUSED_KEYWORDS)
def test_a_wrong_keyword_is_refused_by_its_own_name(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(OptionsError) as caught:
        call(**keywords)
    assert str(caught.value) == message


@pytest.mark.parametrize("length", range(4, 9))
def test_the_beginning_of_a_flag_is_never_taken_for_it(length: int) -> None:
    with pytest.raises(OptionsError, match=r"^unknown option --\w+: did you mean --strategy\?$"):
        line(f"{'--strategy'[:length]} ddp")


# ------------------------------------------------------------------------------------------------ the one declaration


def test_every_field_is_declared_under_its_own_name() -> None:
    own = {"strategy_options", "pool_options"}
    assert [field.name for field in dataclasses.fields(Options) if field.name not in own] == [o.name for o in OPTIONS]


def test_few_keywords_differ_from_their_flags() -> None:
    assert {o.flag: o.name for o in OPTIONS if o.flag != "--" + o.name.replace("_", "-")} == {
        "--with": "with_",
        "--timeout": "timeout_s",
        "--hang-timeout": "hang_timeout_s",
        "--wait": "wait_s",
        "--grow-after": "grow_after_s",
    }


def test_no_synonym_belongs_to_two_options_or_hides_one() -> None:
    words = [word for option in OPTIONS for word in (option.flag.lstrip("-"), *option.synonyms)]
    assert len(words) == len(set(words))


def test_options_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().gpus = 1  # type: ignore[misc]


def test_importing_the_options_loads_nothing_heavy() -> None:
    code = "import sys, jupyter_distrib.kernel.settings.cell_options; print(*({'torch', 'ray', 'ipykernel'} & sys.modules.keys()))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ""


# ------------------------------------------------------------------------------------------------ help and completion


def test_the_help_begins_with_the_usage() -> None:
    assert help_text(strategies=STRATEGIES, pools=POOLS).startswith("usage: %%distributed [OPTION]... [# comment]\n")


def test_the_help_has_one_aligned_line_for_each_option() -> None:
    text = help_text(strategies=STRATEGIES, pools=POOLS)
    lines = [each for each in text.splitlines() if each.startswith("  --")]
    assert len(lines) == len(OPTIONS) + 5
    assert len({re.match(r"  --.*?  +(?=\S)", each).end() for each in lines}) == 1  # type: ignore[union-attr]


def test_the_help_names_choices_and_defaults() -> None:
    text = help_text(strategies=STRATEGIES, pools=POOLS)
    assert "; one of local, ray (default: local)" in text


def test_the_help_puts_own_options_under_the_names_of_those_that_declare_them() -> None:
    text = help_text(strategies=STRATEGIES, pools=POOLS)
    assert "\n\nWith --strategy fsdp:\n  --fsdp-unit CLASS " in text
    assert "\n\nWith --strategy ddp or fsdp:\n  --batch N " in text


def tables() -> dict[str, list[str]]:
    """The rows of each table of the docs, by its heading."""
    text = markdown_tables(strategies=STRATEGIES, pools=POOLS)
    sections = [each.splitlines() for each in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    return {heading: [row for row in rows if row] for heading, *rows in sections}


def test_there_are_eight_tables_with_a_row_for_each_option() -> None:
    found = tables()
    assert len(found) == 8
    assert sum(len(rows) - 2 for rows in found.values()) == len(OPTIONS) + 5
    for rows in found.values():
        assert len(rows) > 2
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_a_row_says_flag_meaning_default_and_keyword() -> None:
    assert tables()["Time limits"][2] == (
        '| <a id="--timeout"></a>`--timeout S` | stop after S seconds | no limit | `timeout_s` |'
    )
    assert "| ddp or fsdp | " in next(row for row in tables()["Options of strategies"] if "`--batch N`" in row)


def test_each_option_has_an_anchor_of_its_own() -> None:
    text = markdown_tables(strategies=available.STRATEGIES, pools=available.POOLS)
    anchors = re.findall(r'<a id="([^"]+)">', text)
    assert len(anchors) == len(set(anchors)) == text.count("\n| <a id=")
    assert {"--gpus", "--python", "--python-command"} <= {*anchors}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", FLAGS),
        ("%%distributed ", FLAGS),
        ("--g", ["--gpus", "--gpu-type", "--grow-after"]),
        ("--e", ["--env", "--explain"]),
        ("--gpus 2 --g", ["--gpu-type", "--grow-after"]),
        ("--gpus=2 --g", ["--gpu-type", "--grow-after"]),
        ("--env A=1 --keep a --with b --", FLAGS),
        ("--gpus ", []),
        ("--gpus 2", []),
        ("gp", []),
        ("--strategy ", ["none", "ddp", "fsdp"]),
        ("%%distributed --gpus 2 --strategy f", ["fsdp"]),
        ("--strategy=d", ["--strategy=ddp"]),
        ("--pool ", ["local", "ray"]),
        ("--strategy ddp --st", ["--static-graph"]),
        ("--st", ["--strategy"]),
        ("--strategy fsdp --precision ", ["bf16", "fp32"]),
        ("--strategy nonsense --g", []),
        ("--nonsense=", []),
        ("--gpus 2 # --", []),
        ("--env 'A=", []),
    ],
)
def test_the_word_at_the_cursor_is_completed(text: str, words: list[str]) -> None:
    assert completed(text) == words


# ------------------------------------------------------------------------------------------------ line magics


def test_any_magic_can_have_its_line_read_by_declarations() -> None:
    arguments = parse_arguments("a --batch=3 'b c' # d", (BATCH,))
    assert (arguments.values, arguments.positionals) == ({"batch": 3}, ("a", "b c"))


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("", LogsRequest()),
        ("7f-3", LogsRequest(run="7f-3")),
        ("--rank 0", LogsRequest(rank=0)),
        ("--rank=2 7f-3 # the slow one", LogsRequest(run="7f-3", rank=2)),
    ],
)
def test_logs_take_a_run_and_a_rank(text: str, request_: LogsRequest) -> None:
    assert parse_logs(text) == request_


@pytest.mark.parametrize(("text", "run"), [("", None), ("7f-3", "7f-3")])
def test_attach_takes_a_run(text: str, run: str | None) -> None:
    assert parse_attach(text) == run


def test_status_takes_nothing() -> None:
    assert parse_status(" # all of it") == StatusRequest()


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("", PoolRequest(action="list")),
        ("list", PoolRequest(action="list")),
        ("use ray", PoolRequest(action="use", name="ray")),
        ("remove ray", PoolRequest(action="remove", name="ray")),
        (
            "add lab --kind ray --address head:6379",
            PoolRequest(action="add", name="lab", kind="ray", values={"address": "head:6379"}),
        ),
        ("start", PoolRequest(action="start")),
        ("start ray --gpus 2", PoolRequest(action="start", name="ray", size=GroupSize(count=2))),
        ("stop", PoolRequest(action="stop")),
        ("restart local", PoolRequest(action="restart", name="local")),
        ("trust local", PoolRequest(action="trust", name="local")),
        ("resize 4", PoolRequest(action="resize", count=4)),
        ("resize --ranks 4", PoolRequest(action="resize", size=GroupSize(count=4, gpus=False))),
    ],
)
def test_pool_takes_an_action_and_what_it_needs(text: str, request_: PoolRequest) -> None:
    assert parse_pool(text, pools=POOLS, of_kinds=POOLS) == request_


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stat", "%distributed_pool stat is not known: did you mean start?"),
        (
            "xyz",
            "%distributed_pool xyz is not known: choose list, use, add, remove, start, stop, restart, resize, up, down or trust",
        ),
        ("remove", "remove needs the name of a pool: choose local or ray"),
        ("add", "add needs the kind of the pool: write add NAME --kind local|ray"),
        ("add lab --kind rya", "--kind rya is not known: did you mean ray?"),
        ("add --kind ray", "add takes one name for the pool; got none"),
        ("add a b --kind ray", "add takes one name for the pool; got 'a b'"),
        ("add lab --kind ray --adress x", "unknown option --adress: did you mean --address?"),
        (
            "add lab --kind local --address x",
            "--address is an option of --kind ray: choose that, or leave --address out",
        ),
        ("use", "use needs the name of a pool: choose local or ray"),
        ("use rya", "pool rya is not known: did you mean ray?"),
        ("use 4", "use takes the name of a pool, not 4: did you mean resize 4?"),
        ("start 4", "start takes the name of a pool, not 4: did you mean start --gpus 4?"),
        ("start --gpus 1 --ranks 1", "start takes one of --gpus N or --ranks N; got 2 of them"),
        ("start --gpu 1", "unknown option --gpu: did you mean --gpus?"),
        ("stop --gpus 1", "stop takes no --gpus or --ranks: only start and resize do"),
        ("list ray", "list takes no name: leave 'ray' out"),
        ("resize", "resize takes one of N, --gpus N or --ranks N; got none of them"),
        ("resize 2 --gpus 2", "resize takes one of N, --gpus N or --ranks N; got 2 of them"),
        ("resize -1", "resize must be a whole number, at least 1; got '-1'"),
        ("resize ray", "resize must be a whole number, at least 1; got 'ray'"),
        (
            "stop local now",
            (
                "'now' is one word too many: the line is "
                "%distributed_pool list|use|add|remove|start|stop|restart|resize|up|down|trust [NAME or N] [--gpus N | --ranks N]"
            ),
        ),
    ],
)
def test_a_wrong_pool_line_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(OptionsError) as caught:
        parse_pool(text, pools=POOLS, of_kinds=POOLS)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_logs, "--rank -1", "--rank must be a rank, counted from 0; got '-1'"),
        (parse_logs, "--ranks 1", "unknown option --ranks: did you mean --rank?"),
        (parse_logs, "a b", "'b' is one word too many: the line is %distributed_logs [RUN] [--rank R] [--json]"),
        (parse_attach, "a b", "'b' is one word too many: the line is %distributed_attach [RUN]"),
        (parse_status, "a", "'a' is one word too many: the line is %distributed_status [--doctor | --json]"),
        (parse_status, "--doctor --json", "--doctor and --json exclude each other: leave one out"),
        (parse_status, "--all", "unknown option --all: choose --doctor or --json"),
    ],
)
def test_a_wrong_line_of_another_magic_is_refused(parse, text: str, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(OptionsError) as caught:
        parse(text)
    assert str(caught.value) == message


def test_a_range_of_ranks_is_a_size_with_a_minimum_in_every_spelling() -> None:
    wanted = GroupSize(count=8, gpus=False, least=2, step=2)
    given = line("--ranks 2:8:2 --grow-after 30")

    assert given.size == wanted == call(ranks="2:8:2").size
    assert [*given.size.several] == [2, 4, 6, 8]
    assert line(to_line(given).removeprefix(MAGIC)) == given
    assert Options().resized(wanted).size == wanted
    assert given.given()["ranks"] == "2:8:2"
    assert line("--gpus 3:3").size == GroupSize(count=3)
    assert not line("--ranks 3").size.several
    assert pickle.loads(pickle.dumps(given)).size == wanted
