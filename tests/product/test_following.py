"""`run.logs(follow=True)` and `run.events()`: what a program hears of a run while it goes on, up to its end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

WAITS_FOR_A_FILE = """\
%%distributed --ranks 2 --detach --out job
import jupyter_distrib, os, sys, time
print('first')
jupyter_distrib.report(loss=0.5 + rank)
while not os.path.exists({go!r}):
    time.sleep(0.01)
print('second')
sys.stdout.write('unfinished')
jupyter_distrib.report(loss=float('nan'))
if {fails}:
    raise LookupError('nothing there')
rank
"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    yield shared_notebook
    shared_notebook.forget()


def cell(go: Path, *, fails: bool = False) -> str:
    return WAITS_FOR_A_FILE.format(go=str(go), fails=fails)


def test_followed_logs_give_each_line_as_it_comes_and_end_with_the_run(book: Notebook, tmp_path: Path) -> None:
    book.ok(cell(tmp_path / "go"))
    book.ok(f"go = {str(tmp_path / 'go')!r}")
    for limit in ("timeout=0.01", "timeout_s=0.01", "0.01"):
        waited = book.fails(f"job.result({limit})")
        assert (waited.ename, "has not ended after 0.01 s" in waited.evalue) == ("TimeoutError", True), waited.text
    assert "use result(timeout=3)" in book.fails("job.wait(3)").evalue
    followed = book.ok(
        dedent("""\
            lines = job.logs(1, follow=True)
            seen = [next(lines)]
            still = job.done()
            open(go, 'w').close()
            seen += lines
            print(seen, still, job.done())""")
    )
    assert followed.stdout == "['first', 'second', 'unfinished'] False True\n"
    again = book.ok("print(sorted(job.logs(follow=True)))")
    assert again.stdout.startswith("['[0] first', '[0] second', '[0] unfinished', '[1] first'")
    for call in ("logs(7, follow=True)", "logs(7)", "logs(-1)", "logs('0')", "log_file(7)"):
        assert re.search(r"has no rank \S+: it was on rank", book.fails(f"job.{call}").evalue), call


def test_events_are_json_from_the_first_report_to_the_end(book: Notebook, tmp_path: Path) -> None:
    book.ok(cell(tmp_path / "go", fails=True))
    book.ok(f"go = {str(tmp_path / 'go')!r}")
    followed = book.ok(
        dedent("""\
            import json, os
            seen = []
            for event in job.events():
                seen.append(json.loads(json.dumps(event)))
                if event['event'] == 'metrics' and not os.path.exists(go):
                    open(go, 'w').close()
            kinds = [each['event'] for each in seen]
            print(kinds[-1], kinds.count('ended'), seen[-1]['state'], seen[-1]['errors'][0]['type'])
            print([each['values'] for each in seen if each['event'] == 'metrics' and each['rank'] == 1])
            print([each['text'] for each in seen if each['event'] == 'output' and each['rank'] == 0])
            print({each['run'] for each in seen} == {job.id}, [e['state'] for e in seen if e['event'] == 'state'][0])
            print([each['message'] for each in seen if each['event'] == 'rank' and each['state'] == 'failed'][:1])""")
    )
    assert followed.stdout.splitlines() == [
        "ended 1 failed LookupError",
        "[{'loss': 1.5}, {'loss': 'nan'}]",
        "['first', 'second', 'unfinished']",
        "True running",
        "['nothing there']",
    ]
    later = book.ok("after = [e['event'] for e in job.events()]\nprint(after[-1], after.count('metrics'))")
    assert later.stdout == "ended 4\n"
