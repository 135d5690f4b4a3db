"""Measure everything that README and docs claim, print a table, and keep it in `results/`.

python benchmarks/run.py [--quick] [--only ROW ...] [--peers | --no-peers] [--package FOLDER] [--write-page]
"""

from __future__ import annotations

import argparse
import compileall
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import peers
import report
import rows_browser
import rows_checkpoints
import rows_data
import rows_queue
import rows_ray
import rows_slurm
import rows_ssh
import rows_start
import rows_trackers
import rows_training
import rows_trouble
import rows_unchanged
import rows_view
from plan import Plan
from report import Figure

ROWS: dict[str, Callable[[Plan], Iterator[Figure]]] = {
    "noop": rows_start.noop,
    "first": rows_start.first,
    "restart": rows_start.restart,
    "fresh": rows_start.fresh,
    "queued": rows_queue.queued,
    "script": rows_queue.script,
    "captured": rows_data.captured,
    "unchanged": rows_unchanged.unchanged,
    "returned": rows_data.returned,
    "prints": rows_data.prints,
    "million": rows_data.million,
    "training": rows_training.training,
    "one-rank": rows_training.one_rank,
    "tracked": rows_trackers.tracked,
    "tracker-hangs": rows_trackers.hanging,
    "memory": rows_training.memory,
    "numpy": rows_training.linear_algebra,
    "killed": rows_trouble.killed,
    "restarted": rows_trouble.restarted,
    "saved": rows_checkpoints.saved,
    "interrupted": rows_trouble.interrupted,
    "import": rows_start.imported,
    "growth": rows_trouble.growth,
    "flood": rows_view.flood,
    "watched": rows_view.watched,
    "stop": rows_browser.stop,
    "frames": rows_browser.frames,
    "ray-noop": rows_ray.noop,
    "ray-first": rows_ray.first,
    "ray-fresh": rows_ray.fresh,
    "ray-restart": rows_ray.restart,
    "ray-value": rows_ray.value,
    "ray-prints": rows_ray.prints,
    "ssh-noop": rows_ssh.noop,
    "ssh-first": rows_ssh.first,
    "ssh-value": rows_ssh.value,
    "ssh-cut": rows_ssh.cut,
    "slurm-granted": rows_slurm.granted,
    "slurm-value": rows_slurm.value,
    "pipes": rows_slurm.piped,
    "many": rows_ray.many,
}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    options = _options()
    plan = Plan(quick=options.quick, package=options.package.resolve())
    compileall.compile_dir(plan.package / "jupyter_distrib", quiet=2)  # as pip does when it installs a package
    about = report.machine()
    print(report.sentence(about), flush=True)
    figures: list[Figure] = []
    broken: list[str] = []
    for name in ROWS if options.only is None else options.only:
        began_s = time.monotonic()
        figures += _row(name, plan, broken)
        print(f"  [{name}: {time.monotonic() - began_s:.0f} s]", flush=True)
    side_by_side = peers.compare(plan, options.only_peers) if options.peers else []
    body = report.text(about, figures, side_by_side)
    print(f"\n{body}")
    print(f"\n{report.save(options.results, about, figures, side_by_side)}")
    if options.write_page:
        report.write_page(body)
    if broken:
        sys.exit(f"broken: {', '.join(broken)}")


def _row(name: str, plan: Plan, broken: list[str]) -> list[Figure]:
    """The figures of one row; a row that breaks is a figure too, and its name goes to `broken`."""
    figures = []
    try:
        for figure in ROWS[name](plan):
            figures.append(figure)
            print(f"{figure.verdict or '-':7} {figure.what}: {figure.measured}   [{figure.target}]", flush=True)
    except Exception as error:
        figures.append(Figure(what=name, measured=f"{type(error).__name__}: {error}"[-400:], ok=False))
        broken.append(name)
        print(f"BROKEN  {name}: {type(error).__name__}: {error}", flush=True)
    return figures


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="few repetitions: does everything work?")
    add("--only", nargs="*", choices=list(ROWS), metavar="ROW", help=f"some of: {', '.join(ROWS)}; nothing: none")
    add("--peers", action=argparse.BooleanOptionalAction, help="run the peers too (default: unless --quick or --only)")
    add("--only-peers", nargs="+", choices=list(peers.PEERS), metavar="PEER", help=f"of {', '.join(peers.PEERS)}")
    add("--package", type=Path, default=Plan().package, help="measure the jupyter_distrib in this folder")
    add("--results", type=Path, default=report.HERE / "results", help="folder for what was measured")
    add("--write-page", action="store_true", help="put the tables into docs/benchmarks.md")
    options = parser.parse_args()
    if options.peers is None:
        options.peers = not options.quick and options.only is None
    return options


if __name__ == "__main__":
    main()
