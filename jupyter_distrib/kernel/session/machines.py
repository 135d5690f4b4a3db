"""The machines that pools start on demand, as this notebook sees and commands them. Kernel side.

What is shown is read from files, so that looking neither starts nor waits for anything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.settings.settings import NamedPool, Settings
from jupyter_distrib.pools.machines import options as machine_options
from jupyter_distrib.pools.machines import summary
from jupyter_distrib.pools.machines.machine import Machine, start_keeper
from jupyter_distrib.pools.machines.record import ENDED, Place, Record, Use, known
from jupyter_distrib.system import interrupts
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m

SHOWN_S = 86_400.0
"""Seconds for which machines that have ended are shown."""
FREE_S = 15.0
"""Seconds in which a notebook's own ranks leave machines that are to be ended."""
LOOK_S = 0.2


@data_class
class MachineStatus:
    """Machines of this user that a pool has started."""

    pool: str
    """The names of the pools that have them; empty if no pool of this notebook does."""
    state: str
    """The state: `starting`, `up`, `ending` or `ended`."""
    text: str
    """The state in words."""
    hosts: str
    began_at_s: float
    elapsed_s: float
    """The time since their start."""
    price: float
    """The price of an hour; 0 if unknown."""
    cost: float
    end: str
    """A phrase on when they end."""
    problem: str
    """A sentence on machines that cannot be ended; empty if there is no problem."""
    down: str
    """The command that ends them."""
    log: str

    @classmethod
    def of(cls, place: Place, record: Record, pool: str) -> MachineStatus:
        now_s = time.time()
        return cls(
            pool=pool,
            state=record.state,
            text=summary.state(record, is_held=place.is_held()),
            hosts=record.hosts,
            began_at_s=record.began_at_s,
            elapsed_s=record.elapsed_s(now_s),
            price=record.price,
            cost=record.cost(now_s),
            end=summary.end(record),
            problem=summary.stuck(record, place) if record.failures and record.alive else "",
            down=record.plan["down"],
            log=str(place.log),
        )


def statuses(settings: Settings) -> tuple[MachineStatus, ...]:
    """Return this user's machines; any that ended more than a day ago are left out."""
    pools: dict[Place, list[str]] = {}
    for pool in settings.pools.values():
        if "up" in pool.options:
            pools.setdefault(Place.of(pool.options), []).append(pool.name)
    shown_s = time.time() - SHOWN_S
    return tuple(
        MachineStatus.of(place, record, ", ".join(pools.get(place, ())))
        for place, record in known()
        if record.alive or record.ended_at_s > shown_s
    )


def as_dicts(session: Session) -> list[dict[str, Any]]:
    """Return the same as JSON can carry it."""
    settings, _ = session.choices.readable_settings()
    return [{"machines": each.pool, **m.fields_of(each)} for each in statuses(settings)]


def of_pool(pool: NamedPool) -> str:
    """Describe the machines of a pool in a few words; empty if it has none, or does not start any."""
    if "up" not in pool.options:
        return ""
    place = Place.of(pool.options)
    if (record := place.record()) is None or not record.alive:
        return ""
    costs = f", {summary.cost(record)} until now" if record.price else ""
    failure = f": {record.failure}" if record.failures else ""
    return f"{summary.state(record, is_held=place.is_held())}{failure}{costs}"


def start(session: Session, name: str, say: Callable[[str], Any]) -> None:
    """Start the machines of a pool, and wait until they are up; an interrupt ends them again. Raises `PoolError`."""
    machine = _machine(session, name)
    use = Use(machine.place)
    use.begin()
    try:
        machine.obtain(lambda text: say(f"Waiting: {text}"), threading.Event())
    finally:
        use.end()
        use.close()


def end(session: Session, name: str, say: Callable[[str], Any]) -> None:
    """End this notebook's ranks on the machines of a pool, and then the machines. Raises `PoolError`."""
    machine = _machine(session, name)
    record = machine.record()
    if record is None or not record.alive:
        raise PoolError(f"the pool {name} has no machines that are up.")
    session.pools.stop_ranks(name)
    _ask_for_end(machine, name)
    say(f"Waiting: `down` ends the machines of {name}.")
    failures = record.failures
    while (now := machine.record()) is not None and now.life == record.life and now.state != ENDED:
        if now.failures > failures:
            raise PoolError(summary.stuck(now, machine.place))
        interrupts.wait(threading.Event(), LOOK_S)


def _ask_for_end(machine: Machine, name: str) -> None:
    use, until_s = Use(machine.place), time.monotonic() + FREE_S
    try:
        while not use.claim():
            if time.monotonic() > until_s:
                raise PoolError(
                    f"the machines of {name} are in use by another notebook, or by a run that goes on: stop it first."
                )
            interrupts.wait(threading.Event(), LOOK_S)
        machine.place.ask_for_end("%distributed_pool down was run")
    finally:
        use.close()
    if not machine.place.is_held():
        start_keeper(machine.place, {"wanted": False})


def _machine(session: Session, name: str) -> Machine:
    pool = session.choices.readable_settings()[0].pools[name]
    session.choices.check_trusted(pool)
    if "up" not in pool.options:
        raise PoolError(f"the pool {name} starts no machines: it has no option `up`.")
    machine_options.check(pool.options)
    return Machine(pool.options)
