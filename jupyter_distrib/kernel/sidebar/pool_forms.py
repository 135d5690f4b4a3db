"""The forms in which a user defines pools: their fields, what is wrong with an entry, a test of the connection, and the
settings file into which it goes. Kernel side; requests come in the thread of the front end.

The kernel tells pages what a form consists of, from the options that each kind of pool declares; pages know no
kinds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from jupyter_distrib.addresses import without_secrets
from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.settings import pool_files
from jupyter_distrib.kernel.settings.pool_definitions import nameable, options_of
from jupyter_distrib.kernel.settings.pool_files import Definition, SettingsFile
from jupyter_distrib.options import Declared, Option
from jupyter_distrib.pools import base, discovery
from jupyter_distrib.pools.trial import Trial
from jupyter_distrib.wire import messages as m


class PoolForms:
    """The forms of all pages of this kernel; one test of a connection at a time.

    Args:
        changed: Called when the state of the test has changed; from any thread.
    """

    def __init__(self, changed: Callable[[], object]) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._trial: Trial | None = None
        self.trial: dict[str, str] | None = None
        """The test of a connection, for the overview: its `id`, its `state` (`running`, `good` or `bad`), and the
        result as a sentence in `text`."""

    def handle(self, op: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a request. Raises `DistributedError`."""
        match op:
            case "pool_forms":
                return _forms(str(request.get("pool") or ""))
            case "try_pool":
                return self._try(request)
            case "end_trial":
                self.end_trial(str(request.get("id", "")))
            case "write_pool":
                return _written(request)
            case _:
                answer = session.current().choices.trust(
                    str(request.get("pool")) or None, seen=str(request.get("digest"))
                )
                return {"told": answer}
        return {}

    def end_trial(self, name: str = "") -> None:
        """End the test of this id, and all that it has started; of any id by default."""
        with self._lock:
            trial = self._trial if self.trial and name in ("", self.trial["id"]) else None
            if trial is not None:
                self._trial = self.trial = None
        if trial is not None:
            trial.end()
            self._changed()

    def _try(self, request: Mapping[str, Any]) -> dict[str, Any]:
        current = session.current()
        definition, file = _definition(request), _file(request)
        if definition.before is not None and definition.name in current.settings.pools:
            current.choices.check_trusted(current.settings.pools[definition.name])
        if found := pool_files.problems(definition, current.settings):
            return {"errors": found}
        pool, name = pool_files.pool_of(definition, current.settings, file.path), str(request.get("id", ""))
        self.end_trial()

        def on_result(ok: bool, text: str) -> None:
            with self._lock:
                if self.trial is not shown:
                    return
                self._trial = None
                self.trial = {**shown, "state": "good" if ok else "bad", "text": without_secrets(text)}
            self._changed()

        shown = {"id": name, "state": "running", "text": ""}
        with self._lock:
            self.trial = shown
            self._trial = Trial(pool.kind, pool.options, on_result)
        self._changed()
        return {}


def _forms(pool: str) -> dict[str, Any]:
    """Return what forms consist of, and what was found on this machine; for a pool its definition, and no findings."""
    from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES

    answer: dict[str, Any] = {
        "kinds": [
            {
                "kind": kind,
                "about": base.summary_of(kind),
                "fields": [*_fields(kind, POOLS, STRATEGIES)],
            }
            for kind in nameable(POOLS)
        ],
        "files": [m.fields_of(file) for file in pool_files.files()],
    }
    if not pool:
        return {**answer, "found": [m.fields_of(each) for each in discovery.found()]}
    settings = session.current().settings
    if pool not in settings.pools:
        raise OptionsError(f"there is no pool {pool} any more.")
    file = pool_files.file_of(settings.pools[pool])
    kind, values = pool_files.present(file, pool)
    return {**answer, "edited": {"name": pool, "kind": kind, "values": values, "file": file.key}}


def _fields(kind: str, kinds: Declared, strategies: Declared) -> list[dict[str, Any]]:
    """Return the fields of a kind. The usual ones come first, and the ones for cells last."""
    own, needed = {option.name for option in kinds[kind]}, base.needed_by(kind)
    options = options_of(kind, kinds, strategies)
    options = tuple(sorted(options, key=lambda option: (not _is_main(option, needed), option.name not in own)))
    return [
        {
            "name": option.name,
            "meaning": option.meaning,
            "default": option.default,
            "choices": list(option.choices),
            "switch": not option.metavar,
            "main": _is_main(option, needed),
            "example": needed.get(option.name, "").strip('"'),
        }
        for option in options
    ]


def _is_main(option: Option, needed: Mapping[str, str]) -> bool:
    return option.main or option.name in needed


def _written(request: Mapping[str, Any]) -> dict[str, Any]:
    """Write a pool into a file, if nothing is wrong with it; else return what is wrong, for each field."""
    current = session.current()
    definition, file, settings = _definition(request), _file(request), current.settings
    found = pool_files.problems(definition, settings)
    if taken := pool_files.name_taken(definition, file, settings):
        found.setdefault("name", taken)
    if found:
        return {"errors": found}
    pool_files.pool_of(definition, settings, file.path)
    pool_files.write(definition, file, settings)
    return {"told": _written_where(definition.name, file)}


def _written_where(name: str, file: SettingsFile) -> str:
    """Return a sentence on a pool that has been written."""
    current = session.current()
    pool = current.settings.pools.get(name)
    if pool is None or (pool.project_file is None and pool.origin != file.shown):
        return f"The pool {name} is in {file.shown}, but another definition of it comes first."
    if pool.project_file is not None:
        return f"The pool {name} is in {file.shown}. That file waits for your trust, and so does the pool."
    return f"The pool {name} is in {file.shown}, and can be used."


def _definition(request: Mapping[str, Any]) -> Definition:
    name, kind, values, before = (request.get(key) for key in ("name", "kind", "values", "before"))
    if not isinstance(name, str) or not isinstance(kind, str):
        raise OptionsError("the request has no name or kind of a pool.")
    from jupyter_distrib.kernel.settings.available import POOLS

    if kind not in nameable(POOLS):
        raise OptionsError(f"there is no kind of pool {kind}.")
    return Definition(
        name=name.strip(), kind=kind, values=_texts(values), before=None if before is None else _texts(before)
    )


def _texts(values: object) -> dict[str, str]:
    """Return the filled fields of a request."""
    if not isinstance(values, Mapping):
        raise OptionsError("the request has no values of fields.")
    texts = {str(key): str(value).strip() for key, value in values.items()}
    return {key: text for key, text in texts.items() if text}


def _file(request: Mapping[str, Any]) -> SettingsFile:
    for file in pool_files.files():
        if file.key == request.get("file"):
            return file
    raise OptionsError("the request names no settings file.")
