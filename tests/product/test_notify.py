"""`notify` in the user's own settings: a command or a webhook is told of the end of runs, and nothing else is sent."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from textwrap import dedent
from typing import Any, ClassVar

import pytest

from tests.notebook import Notebook
from tests.processes import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Notebook]:
    folder = tmp_path / "project"
    folder.mkdir()
    with Notebook(folder, {"JUPYTER_DISTRIB_CONFIG": str(tmp_path / "pools.toml")}) as notebook:
        (tmp_path / "pools.toml").write_text("")
        notebook.ok("%load_ext jupyter_distrib")
        yield notebook


def settings(book_folder: Path, text: str) -> None:
    (book_folder / "pools.toml").write_text(text)


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def command_into(path: Path) -> str:
    return f"""cat >> {path}; echo >> {path}; printf '%s' "$JUPYTER_DISTRIB_TEXT" > {path}.text"""


def test_a_command_is_told_of_the_end_with_state_metrics_and_error(book: Notebook, tmp_path: Path) -> None:
    news = tmp_path / "news"
    settings(tmp_path, f"notify = '''{command_into(news)}'''\n")
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            import jupyter_distrib
            jupyter_distrib.report(loss=0.25 + rank)""")
    )
    wait_until(lambda: len(told(news)) == 1)
    book.fails("%%distributed --ranks 2\nraise LookupError('no $(touch /tmp/x) password=hunter2')")
    wait_until(lambda: len(told(news)) == 2)

    done, failed = told(news)
    assert (done["state"], done["metrics"], done["error"]) == ("done", {"loss": 0.25}, "")
    assert done["label"].startswith("Cell In[")
    assert 0 < done["elapsed_s"] < 60
    assert failed["state"] == "failed"
    assert "LookupError: no $(touch /tmp/x)" in failed["error"]
    assert "hunter2" not in json.dumps(failed)
    assert wait_until(lambda: re.match(r"Cell In\[\d+\]: failed after", Path(f"{news}.text").read_text()))


def test_a_short_run_is_not_reported_and_nothing_is_by_default(book: Notebook, tmp_path: Path) -> None:
    news = tmp_path / "news"
    book.ok("%%distributed --ranks 1\nrank")
    settings(tmp_path, f"notify_after = 600\nnotify = '''{command_into(news)}'''\n")
    book.ok("%%distributed --ranks 1\nrank")
    settings(tmp_path, f"notify = '''{command_into(news)}'''\n")
    book.ok("%%distributed --ranks 1\n'last'")
    wait_until(lambda: bool(told(news)))
    assert len(told(news)) == 1


def test_a_file_that_came_with_the_folder_is_never_followed(book: Notebook, tmp_path: Path) -> None:
    news = tmp_path / "news"
    (tmp_path / "project" / "jupyter_distrib.toml").write_text(f"notify = '''{command_into(news)}'''\npool = 'spark'\n")
    own = tmp_path / "own"
    settings(tmp_path, f"notify = '''{command_into(own)}'''\n")
    told_of = book.ok("%%distributed --ranks 1 --pool local\nrank").stdout
    assert "notify in jupyter_distrib.toml is not followed: only your own file, " in told_of
    book.ok("%distributed_pool trust")
    book.ok("%%distributed --ranks 1 --pool local\nrank")
    wait_until(lambda: len(told(own)) == 2)
    assert not news.exists()


def test_a_command_that_fails_is_reported_below_the_run(book: Notebook, tmp_path: Path) -> None:
    settings(tmp_path, "notify = 'echo no such channel >&2; exit 3'\n")
    book.ok("%%distributed --ranks 1 --out got\nrank")
    line = "%distributed_status --json"
    wait_until(lambda: "the command has exited with 3: no such channel." in book.ok(line).stdout)


def test_a_detached_run_tells_after_its_kernel_has_gone(book: Notebook, tmp_path: Path) -> None:
    news, go = tmp_path / "news", tmp_path / "go"
    settings(tmp_path, f"notify = '''{command_into(news)}'''\n")
    book.ok(
        dedent(f"""\
            %%distributed --ranks 2 --detach
            import jupyter_distrib, os, time
            jupyter_distrib.report(loss=0.5)
            while not os.path.exists({str(go)!r}):
                time.sleep(0.01)
            raise LookupError('late')""")
    )
    book.restart()
    go.touch()
    wait_until(lambda: len(told(news)) == 1)
    (run,) = told(news)
    assert (run["state"], run["metrics"], run["error"]) == ("failed", {"loss": 0.5}, "LookupError: late")


class Webhook(BaseHTTPRequestHandler):
    got: ClassVar[list[tuple[str, dict[str, Any]]]]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.path, json.loads(body)))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def webhook() -> Iterator[tuple[str, type[Webhook]]]:
    class Own(Webhook):
        got: ClassVar = []

    server = HTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Own
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook_gets_the_news_and_its_address_is_never_shown(
    book: Notebook, tmp_path: Path, webhook: tuple[str, type[Webhook]]
) -> None:
    address, handler = webhook
    settings(tmp_path, f'notify = "{address}/hooks/s3cr3t?token=abc"\n')
    book.ok("%%distributed --ranks 1\nrank")
    wait_until(lambda: len(handler.got) == 1)
    path, news = handler.got[0]
    assert (path, news["state"]) == ("/hooks/s3cr3t?token=abc", "done")
    assert news["text"].startswith("Cell In[")
    handler.status = 500
    book.ok("%%distributed --ranks 1\nrank")
    line = "%distributed_status --json"
    wait_until(lambda: "127.0.0.1 has answered 500." in book.ok(line).stdout)
    assert "s3cr3t" not in book.ok(line).stdout + book.ok("%distributed_status").text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("notify = 'ftp://example.org/x'\n", "must be a command, or an address that begins with https://"),
        ("notify = \"a\\nb\"\n", "must be a command or an address of one line"),
        ("notify = ''\n", "notify"),
        ("notify_after = -1\n", "notify_after must be a number, at least 0"),
        ("notifi = 'x'\n", "did you mean notify?"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused(book: Notebook, tmp_path: Path, text: str, why: str) -> None:
    settings(tmp_path, text)
    assert why in book.fails("%%distributed --ranks 1\nrank").evalue
