"""Observers of other packages in a real kernel: what they are told, and that none of them harms a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.kernel.record.observer import ObservedRun, Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.runs import observers
from jupyter_distrib.kernel.session.runs.observers import ObserverThread
from jupyter_distrib.wire import messages as m
from tests.installed_package import bring
from tests.notebook import Notebook

THEIRS = """
import threading
from jupyter_distrib.extend import Ended, Observer

active = {"watching"}
seen = {}  # the observers called "watching", by run
never = threading.Event()


class Watching(Observer):
    def __init__(self, run):
        self.run, self.events, self.threads, self.steps = run, [], set(), []
        seen[run.id] = self

    def begin(self):
        self.threads.add(threading.current_thread().name)
        self.run.note(f"see https://tracker.example/{self.run.id}.")
        return {"WATCHED": self.run.id, "BOTH": "observer"}

    def observe(self, event, record):
        self.threads.add(threading.current_thread().name)
        self.events.append(event)
        self.steps.append(record.changes)
        if isinstance(event, Ended):
            self.states = {number: rank.state for number, rank in record.ranks.items()}
            self.metrics = {number: rank.metrics for number, rank in record.ranks.items()}

    @property
    def kinds(self):
        return [type(event).__name__ for event in self.events if type(event).__name__ not in ("Sampled", "Noted", "Wrote")]


class Raising(Observer):
    def observe(self, event, record):
        raise OSError("the tracker is away")


class Hanging(Observer):
    def observe(self, event, record):
        never.wait()


class HangingAtOnce(Observer):
    def begin(self):
        never.wait()


def follower(name, make):
    def follow(run):
        return make(run) if name in active else None
    return follow


def bad(run):
    raise RuntimeError("not today")


watching = follower("watching", Watching)
raising = follower("raising", lambda run: Raising())
hanging = follower("hanging", lambda run: Hanging())
hanging_at_once = follower("hanging_at_once", lambda run: HangingAtOnce())
failing = follower("failing", bad)
"""
ENTRY_POINTS = "[jupyter_distrib.observers]\n" + "".join(
    f"{name} = theirs:{name}\n" for name in ("raising", "hanging", "hanging_at_once", "failing", "watching")
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return bring(tmp_path_factory.mktemp("package"), ENTRY_POINTS, theirs=THEIRS)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, package: dict[str, str]) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook"), env=package) as book:
        book.ok("%load_ext jupyter_distrib\nimport os, theirs, jupyter_distrib")
        yield book


@pytest.fixture
def book(shared: Notebook) -> Notebook:
    shared.ok("theirs.active = {'watching'}; theirs.seen.clear()")
    return shared


def last(book: Notebook, what: str) -> str:
    """Something of the observer of the last run, as the notebook shows it."""
    return book.ok(f"o = list(theirs.seen.values())[-1]; {what}").result


def test_an_observer_sees_a_whole_run_and_its_environment_reaches_the_ranks(book: Notebook) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 2 --env BOTH=cell --keep kept
            kept = jupyter_distrib.report(loss=float(rank))
            print('line')
            os.environ['WATCHED'], os.environ['BOTH']""")
    )
    run = last(book, "o.run.id").strip("'")
    assert outcome.result == f"ranks 0-1: ('{run}', 'cell')"
    assert f"see https://tracker.example/{run}." in outcome.view
    (html,) = outcome.displays_html.values()
    assert f'<a href="https://tracker.example/{run}"' in html

    kinds = eval(last(book, "o.kinds"))
    assert sorted(kinds[:-1]) == ["Measured"] * 2 + ["Returned"] * 2 + ["Started"] * 2
    assert kinds[0] == "Started"
    assert kinds[-1] == "Ended"
    for rank in (0, 1):
        of_rank = last(book, f"[type(e).__name__ for e in o.events if getattr(e, 'rank', None) == {rank}]")
        assert [each for each in eval(of_rank) if each in kinds] == ["Started", "Measured", "Returned"]
    assert last(book, "o.steps == list(range(o.steps[0], o.steps[0] + len(o.steps)))") == "True"
    assert last(book, "''.join(e.text for e in o.events if type(e).__name__ == 'Wrote')") == r"'line\nline\n'"
    assert last(book, "o.states, o.metrics") == "({0: 'done', 1: 'done'}, {0: {'loss': 0.0}, 1: {'loss': 1.0}})"
    assert last(book, "o.threads") == "{'jupyter_distrib-observer-watching'}"


def test_what_it_chooses_in_the_notebook_holds_for_the_run_that_begins(book: Notebook) -> None:
    book.ok(
        dedent("""\
            theirs_begin = theirs.Watching.begin
            def begin(self):
                os.environ['CHOSEN'] = self.run.id
                return theirs_begin(self)
            theirs.Watching.begin = begin""")
    )
    try:
        for _ in range(2):
            outcome = book.ok("%%distributed --ranks 2\nos.environ.get('CHOSEN') == os.environ['WATCHED']")
            assert outcome.result == "ranks 0-1: True"
    finally:
        book.ok("theirs.Watching.begin = theirs_begin; del os.environ['CHOSEN']")


def test_it_knows_what_the_cell_is_run_with(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --on 1 --timeout 50 --env SECRET=1\nrank")
    facts = "r = o.run; r.label.startswith('Cell In['), r.source, dict(r.options), r.strategy, r.pool, r.ranks, r.world_size"
    options = {"on": (1,), "ranks": 2, "strategy": "none", "pool": "local", "timeout_s": 50.0}
    assert eval(last(book, facts)) == (True, "\nrank\n", options, "none", "local", (1,), 2)
    assert last(book, "r.gpus, r.detached, r.attached, abs(__import__('time').time() - r.began_at_s) < 60") == (
        "(False, False, False, True)"
    )


def test_each_run_has_an_observer_of_its_own(book: Notebook) -> None:
    for _ in range(2):
        book.ok("%%distributed --ranks 2 --keep k\nk = rank")
    first, second = eval(book.ok("[(o.run.id, {e.run for e in o.events}) for o in theirs.seen.values()]").result)
    assert first != second
    assert first[1] == {first[0]}
    assert second[1] == {second[0]}
    book.ok("k[0]")
    assert book.ok("len(theirs.seen)").result == "2"  # a value that is fetched is no run


def test_a_failing_run_is_observed_to_its_end(book: Notebook) -> None:
    book.fails("%%distributed --ranks 2\n1 / rank")
    kinds = eval(last(book, "o.kinds"))
    assert "Failed" in kinds
    assert kinds[-1] == "Ended"
    assert last(book, "o.states[0]") == "'failed'"


def test_a_cell_that_cannot_be_sent_is_reported_as_ended(book: Notebook) -> None:
    assert "inline pool" in book.fails("%%distributed --pool inline --strategy ddp\n1").traceback
    assert last(book, "o.kinds") == "['Ended']"


@pytest.mark.parametrize(
    ("name", "why"), [("raising", "OSError: the tracker is away"), ("failing", "RuntimeError: not today")]
)
def test_one_that_raises_is_dropped_with_a_note(book: Notebook, name: str, why: str) -> None:
    for _ in range(2):  # the next run is followed again
        book.ok(f"theirs.active = {{'watching', '{name}'}}")
        outcome = book.ok("%%distributed --ranks 2\nrank")
        assert outcome.result == "rank 0: 0\nrank 1: 1"
        assert f"The observer {name} was dropped: {why}. The run is not affected." in outcome.view
        assert last(book, "o.kinds[-1]") == "'Ended'"


@pytest.mark.slow
def test_one_that_hangs_is_dropped_with_a_note_and_delays_one_run_only(book: Notebook) -> None:
    book.ok("theirs.active = {'watching', 'hanging'}")
    outcome = book.ok("%%distributed --ranks 2\nrank")
    assert outcome.result == "rank 0: 0\nrank 1: 1"
    assert "The observer hanging was dropped: it has not handled the end of the run within 2 s." in outcome.view
    again = book.ok("%%distributed --ranks 2\nrank")
    assert "The observer hanging does not follow this run: it is still hanging in an earlier one." in again.view
    assert "was dropped" not in again.view, "it is not waited for"
    assert last(book, "o.kinds[-1]") == "'Ended'"


@pytest.mark.slow
def test_one_that_hangs_before_the_cell_is_sent_is_dropped(book: Notebook) -> None:
    book.ok("theirs.active = {'watching', 'hanging_at_once'}")
    outcome = book.ok("%%distributed --ranks 2\nos.environ['WATCHED'] != ''")
    assert outcome.result == "ranks 0-1: True"
    assert "The observer hanging_at_once was dropped: its begin() has not returned within 2 s." in outcome.view
    assert "was dropped" not in book.ok("%%distributed --ranks 2\nrank").view


@pytest.mark.slow
def test_a_press_ends_the_wait_for_one_that_hangs(tmp_path: Path, package: dict[str, str]) -> None:
    wait = "observers.FINISH_S = 1000.0; observers.BEGIN_S = 1000.0"
    with Notebook(tmp_path, env=package) as book:
        book.ok(
            dedent(f"""\
                %load_ext jupyter_distrib
                import theirs
                from jupyter_distrib.kernel.session.runs import observers
                {wait}""")
        )
        book.ok("theirs.active = {'hanging'}\nprinted = theirs.Hanging.observe\n")
        book.ok(
            dedent("""\
                def observe(self, event, record):
                    if type(event).__name__ == 'Ended':
                        print('the end', flush=True)
                        theirs.never.wait()
                theirs.Hanging.observe = observe""")
        )
        book.start("%%distributed --ranks 2\nrank")
        book.until("the end")
        book.interrupt()
        assert book.finish(20).ename == "KeyboardInterrupt"


@pytest.mark.slow
def test_detached_and_attached_runs_are_observed(tmp_path: Path, package: dict[str, str]) -> None:
    done = "import theirs\n(o,) = theirs.seen.values()\n"
    with Notebook(tmp_path, env=package) as book:
        book.ok("%load_ext jupyter_distrib\nimport os, theirs, jupyter_distrib")
        book.ok(
            dedent("""\
                %%distributed --ranks 2 --detach --out run
                jupyter_distrib.report(loss=1.0)
                print('begun')
                while not os.path.exists('go'):
                    pass
                os.environ['WATCHED']""")
        )
        run = book.ok(done + "o.run.id").result.strip("'")
        assert book.ok("o.run.detached, o.run.attached").result == "(True, False)"
        book.restart()
        book.ok("%load_ext jupyter_distrib")
        book.ok(f"run = %distributed_attach {run}")
        (tmp_path / "go").touch()
        assert book.ok("run.result()").result == f"ranks 0-1: '{run}'"
        assert book.ok(done + "o.run.id, o.run.attached, o.run.source, dict(o.run.options)").result == (
            f"('{run}', True, '', {{}})"
        )
        assert book.ok("o.metrics").result == "{0: {'loss': 1.0}, 1: {'loss': 1.0}}"
        assert eval(book.ok("o.kinds").result)[-1] == "Ended"


# ------------------------------------------------------------------------------------------- its thread, by itself


class Blocked(Observer):
    def __init__(self) -> None:
        self.free, self.events = threading.Event(), list[m.RunEvent]()

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        self.free.wait()
        self.events.append(event)


def thread_of(observer: Observer, notes: list[str], noted: threading.Event) -> ObserverThread:
    def note(text: str) -> None:
        notes.append(text)
        noted.set()

    facts = ObservedRun(
        id="r", label="l", source="", options={}, strategy="none", pool="local", ranks=(0,), world_size=1, gpus=False,
        detached=False, attached=False, began_at_s=0.0, note=note,
    )  # fmt: skip
    record = RunRecord(run="r", label="l", ranks=[0], world_size=1)
    record.apply(m.Noted(run="r", rank=None, text="before"))
    return ObserverThread("slow", facts, lambda: observer, record, on_hung=lambda _: None)


def test_one_that_falls_behind_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "BACKLOG_BYTES", 10 * observers.EVENT_BYTES)
    observer, notes, noted = Blocked(), list[str](), threading.Event()
    thread = thread_of(observer, notes, noted)
    thread.start()
    record = RunRecord(run="r", label="l", ranks=[0], world_size=1)
    for _ in range(20):
        thread.observe(m.Wrote(run="r", rank=0, stream="stdout", text="x"), record)
    assert noted.wait(10)
    assert notes == ["The observer slow was dropped: it has fallen too far behind the events. The run is not affected."]
    observer.free.set()
    thread.finish(time.monotonic() + 10, given_up=lambda: False)
    assert len(observer.events) <= 1
