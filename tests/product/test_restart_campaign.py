"""Trainings with `--max-restarts` whose processes are killed at random: ranks, all of them at once, forkserver, and the
agent of a host. Each ends with the weights of an undisturbed one, or says why not; in the end nothing is left.

    python -m tests.product.test_restart_campaign KILLS [SEED]
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.processes import agents, wait_until
from tests.product.test_restarts import TRAIN

LIMIT_S = 110.0
HOSTS = (
    f"--pool command --hosts a,b --start 'env HOST={{host}} {{python}}' --python {sys.executable} "
    "--interface lo --nodes 2 "
)
DISTURB = """
import json, random, signal, time
from pathlib import Path

def parent(pid):
    return int(next(line.split()[1] for line in open(f"/proc/{pid}/status") if line.startswith("PPid:")))

def kill(victim, pids, chance):
    if victim == "rank":
        pids = [chance.choice(pids)]
    if victim in ("forkserver", "agent"):
        agent = parent(chance.choice(pids))
        children = map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())
        pids = [agent] if victim == "agent" else [*({*children} - {*pids}), chance.choice(pids)]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

def half_written(folder):
    return any(not (each / ".metadata").exists() for each in Path(folder).glob("save-*"))

def is_time(run, moment, folder, after):
    if moment == "write":
        return half_written(folder)
    ready = all(rank.state == "running" for rank in run.record.ranks.values())
    return moment == "start" or (ready and time.monotonic() > after)

def disturb(run, folder, kills, seed):
    '''Kill as often as the run goes on; return how often that was.'''
    chance, done = random.Random(seed), 0
    for moment, victim in kills:
        after = time.monotonic() + chance.uniform(0.0, 0.6)
        while not run.done() and not (len(run.record.restarts) >= done and is_time(run, moment, folder, after)):
            time.sleep(0.002)
        pids = [rank.pid for rank in run.record.ranks.values() if rank.pid]
        if run.done() or not pids:
            break
        before = len(run.record.restarts)
        try:
            kill(victim, pids, chance)
        except (OSError, StopIteration):
            continue  # one that has ended meanwhile
        done += 1
        limit = time.monotonic() + 20
        while not run.done() and len(run.record.restarts) == before and time.monotonic() < limit:
            time.sleep(0.002)
    return done

def ended(run, calm, wild):
    try:
        run.result(timeout_s=90)
    except Exception as error:
        return json.dumps([type(error).__name__, str(error)])
    weights = [jupyter_distrib.load(name)["model"] for name in (calm, wild)]
    same = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    whole = [each.name for each in Path(wild).iterdir() if (each / ".metadata").exists()]
    return json.dumps(["same weights" if same else "other weights", f"{len(whole)} checkpoints"])
"""


class Campaign:
    """Trainings in one notebook.

    Args:
        book: The notebook.
        seed: The seed of what is trained and killed.
    """

    def __init__(self, book: Notebook, seed: int) -> None:
        self._book, self._random = book, random.Random(seed)
        self.kills = 0
        self.told: list[str] = []
        """The trainings so far, for the message of a failure."""
        for code in ("%load_ext jupyter_distrib", TRAIN, DISTURB):
            assert book.cell(code, LIMIT_S).status == "ok"

    def train(self, kills: int, *, hosts: bool = False) -> None:
        """Train once, with as many kills as that; checks the end."""
        ranks, strategy = self._random.choice((2, 3)), self._random.choice(("ddp", "fsdp"))
        where = HOSTS if hosts else ""
        ranks = 2 if hosts else ranks
        line = f"%%distributed {where}--ranks {ranks} --strategy {strategy}"
        calm, wild = f"calm-{strategy}-{ranks}", f"wild-{len(self.told)}"
        victims = ("rank", "rank", "all", "agent") if hosts else ("rank", "rank", "all", "forkserver")
        plan = [
            (self._random.choice(("any", "any", "start", "write")), self._random.choice(victims)) for _ in range(kills)
        ]
        restarts = self._random.choice((9, 9, 9, 1))
        self.told.append(f"{line} --max-restarts {restarts}, killed {plan}")
        if self._ok(f"os.path.isdir('{calm}')") != "True":
            self._ok(f"%%distributed --ranks {ranks} --strategy {strategy}\ntrain('{calm}')")
        self._ok(f"{line} --max-restarts {restarts} --detach\ntrain('{wild}', 0.05)")
        seed = self._random.randrange(1 << 30)
        done = int(self._ok(f"run = _\ndisturb(run, '{wild}', {plan}, {seed})"))
        self.kills += done
        end = self._ok(f"print(ended(run, '{calm}', '{wild}'))")
        if __name__ == "__main__":
            print(f"{self.told[-1]}: {done} times, {end}", flush=True)
        if end.startswith('["RankLost"'):
            assert done > restarts, self._story(end)
            notes = self._ok("print([str(note) for note in run.record.notes])")
            assert "--max-restarts 1 is used" in notes, self._story(notes)
        else:
            assert end == '["same weights", "2 checkpoints"]', self._story(end)

    def _ok(self, code: str) -> str:
        outcome = self._book.cell(code, LIMIT_S)
        assert outcome.status == "ok", self._story(outcome.text)
        return (outcome.result or outcome.stdout).strip()

    def _story(self, end: str) -> str:
        return "\n".join([*self.told[-3:], end])


def left_of(runtime: Path) -> list[int]:
    """Processes whose agents' sockets are in this folder, or that these have started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if str(runtime).encode() in text and state != "Z" and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def campaign(folder: Path, kills: int, seed: int) -> Campaign:
    """Train until as many processes were killed; nothing is left of it."""
    runtime = folder / "run"
    with Notebook(folder, env={"JUPYTER_DISTRIB_RUNTIME_DIR": str(runtime)}) as book:
        trainings = Campaign(book, seed)
        while trainings.kills < kills:
            count = min(1 + (len(trainings.told) + seed) % 4, kills - trainings.kills)
            trainings.train(count, hosts=len(trainings.told) % 4 == 3)
    for agent in agents(runtime):  # which keep the records of detached runs
        os.kill(agent, signal.SIGTERM)
    assert wait_until(lambda: not left_of(runtime), 20), left_of(runtime)
    return trainings


@pytest.mark.slow
def test_trainings_whose_processes_are_killed_at_random_end_right(tmp_path: Path) -> None:
    assert campaign(tmp_path, 3, seed=12).kills == 3


def _main() -> None:
    kills, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began_s = time.monotonic()
    ended = campaign(Path(tempfile.mkdtemp(prefix="jd-")), kills, seed)
    print(f"seed {seed}: {ended.kills} kills in {len(ended.told)} trainings, {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    _main()
