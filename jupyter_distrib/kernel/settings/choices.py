"""The choices made in this notebook, and the settings with these choices applied. Knows no ranks.

A choice takes precedence over files and environment, and the cell's own line over a choice. Called from the thread that
runs the cell and from the one that serves the front end."""

from __future__ import annotations

from dataclasses import replace

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.kernel.settings import config_files, find_files
from jupyter_distrib.kernel.settings.cell_options import GroupSize, Options
from jupyter_distrib.kernel.settings.find_files import FilesState
from jupyter_distrib.kernel.settings.settings import BUILT_IN, NOTEBOOK, SIDEBAR, NamedPool, Settings, without_files
from jupyter_distrib.system import paths, process_environment
from jupyter_distrib.system.data_class import data_class


@data_class
class ChosenSize:
    """The number of ranks of a pool, and the place where it was chosen."""

    size: GroupSize
    by: str


class Choices:
    """The pools added and the pool, strategy and sizes chosen in this notebook."""

    def __init__(self) -> None:
        self.added: dict[str, NamedPool] = {}
        """The pools that only this notebook has, by name."""
        self.sizes: dict[str, ChosenSize] = {}
        """The chosen sizes, by pool."""
        self.options = Options()
        """The options of the declared run that this process executes."""
        self._pool: str | None = None
        self._pool_by = ""
        self._own_pool: tuple[str | None, str] = (None, "")
        """The last choice made in the notebook itself."""
        self._strategy: str | None = None
        self._announced: set[str] = set()
        self._loaded: tuple[FilesState, Settings] | None = None
        """The state of files and environment when last read, and the resulting settings."""
        self._chosen: tuple[Settings, tuple[object, ...], Settings] | None = None
        """The settings to which choices were last applied, the choices, and the resulting settings."""

    @property
    def settings(self) -> Settings:
        """The pools and defaults as they are now: the same object as before if nothing has changed.

        Raises:
            OptionsError: A file has an error.
        """
        settings = self._from_files()
        choices = self._pool, self._pool_by, self._strategy, self.added.copy(), self.sizes.copy(), self.options
        if self._chosen is None or self._chosen[0] is not settings or self._chosen[1] != choices:
            self._chosen = settings, choices, self._applied_to(settings)
        return self._chosen[2]

    @property
    def last_settings(self) -> Settings:
        """The settings that the last cell had, without a look at the files: those of now if nothing has run yet. Raises
        `OptionsError`."""
        return self.settings if self._chosen is None else self._chosen[2]

    def readable_settings(self) -> tuple[Settings, str]:
        """Return the settings as they are now and an empty string; while the files cannot be read, the last settings,
        or those without files, and a sentence that says so and why."""
        try:
            return self.settings, ""
        except OptionsError as error:
            from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES

            if self._chosen is None:
                built_in = self._applied_to(without_files(POOLS, STRATEGIES))
                return built_in, f"Only the built-in pools are known, and those of this notebook: {error}"
            return self._chosen[2], f"The settings are the last that could be read: {error}"

    def _applied_to(self, settings: Settings) -> Settings:
        if self.added:
            settings = replace(settings, pools=settings.pools | self.added)
        if self.options != Options():
            settings = replace(settings, declared_options=self.options)
        if self._pool in settings.pools:
            settings = replace(settings, pool=self._pool, pool_origin=self._pool_by)
        if self._strategy is not None and self._strategy in settings.strategies:
            settings = replace(settings, strategy=self._strategy, strategy_origin=SIDEBAR)
        pools = settings.pools
        sized = {name: pools[name].resized(each.size, each.by) for name, each in self.sizes.items() if name in pools}
        return replace(settings, pools=pools | sized) if sized else settings

    def _from_files(self) -> Settings:
        variables = process_environment.present()
        state = find_files.state(paths.home(variables), variables)
        if self._loaded is None or self._loaded[0] != state:
            from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES

            self._loaded = state, config_files.load(POOLS, STRATEGIES)
        return self._loaded[1]

    @property
    def pool(self) -> str:
        """The pool of cells that name none."""
        return self.settings.pool

    @property
    def strategy(self) -> str:
        """The strategy of cells that name none."""
        return self.settings.strategy_for()

    def use(self, pool: str | None, by: str = NOTEBOOK) -> None:
        """Make cells use this pool from now on."""
        self._pool, self._pool_by = pool, by
        if by != SIDEBAR:
            self._own_pool = pool, by

    def pick(self, *, pool: str | None = None, strategy: str | None = None, size: GroupSize | None = None) -> None:
        """Choose, in the sidebar, pool, strategy and size for the next cells that name none; None leaves a choice
        unchanged.

        Args:
            pool: Its name.
            strategy: Its name.
            size: The size for the pool that is then in use; `GroupSize()` for the pool's default.
        """
        if pool is not None and pool != self.pool:
            self.use(pool, SIDEBAR)
        if strategy is not None and strategy != self.strategy:
            self._strategy = strategy
        if size is not None:
            self.resize(self.pool, size, SIDEBAR)

    def unpick(self) -> None:
        """Drop the choices of the sidebar: those of the notebook itself, or its settings, apply again."""
        self._pool, self._pool_by = self._own_pool
        self._strategy = None
        self.sizes = {pool: each for pool, each in self.sizes.items() if each.by != SIDEBAR}

    def resize(self, pool: str, size: GroupSize, by: str = NOTEBOOK) -> None:
        """Choose the number of ranks of a pool; nothing changes if the pool has this size already."""
        if size == GroupSize():
            self.sizes.pop(pool, None)
        elif size != self.settings.size_of(pool):
            self.sizes[pool] = ChosenSize(size=size, by=by)

    # ------------------------------------------------------------------------------------------------ project files

    def trust(self, pool: str | None = None, *, seen: str | None = None) -> str:
        """Remember for all notebooks that the user trusts the project's file, or the file that defines this pool, with
        its present content. Return a sentence on the file. Raises `PoolError`.

        Args:
            pool: The name of the pool.
            seen: The digest of the content that the user was shown; None if that is the present one.
        """
        settings = self.settings
        file = settings.waiting if pool is None else settings.pools[pool].project_file or settings.waiting
        if file is None:
            return "Nothing here waits for your trust."
        if seen not in (None, file.digest):
            raise PoolError(f"{file.shown} has changed since you looked at it: look again, and then trust it.")
        try:
            find_files.trust(file.path, file.digest)
        except OSError as error:
            raise PoolError(f"your trust cannot be remembered: {error}.") from None
        return f"{file.shown} is trusted until it changes: {(settings.waiting or file).sets}."

    def check_trusted(self, pool: NamedPool) -> None:
        """Raise `PoolError` for a pool of a project's file that the user does not trust."""
        if (file := pool.project_file) is not None:
            raise PoolError(
                f"the pool {pool.name} is not used yet: {file.shown} sets {file.sets} for it, which you have not "
                f"allowed. If you trust this file, run %distributed_pool trust {pool.name}."
            )

    def unannounced(self, settings: Settings) -> list[str]:
        """Return the sentences on files that are not read or trusted, each once in the life of the kernel."""
        new = [text for text in settings.ignored if text not in self._announced]
        self._announced.update(new)
        return new

    # ------------------------------------------------------------------------------------------------ pools

    def add(self, pool: NamedPool) -> None:
        """Add a pool to this notebook."""
        self.added[pool.name] = pool

    def remove(self, name: str) -> None:
        """Remove a pool from `added`, and the choices for it."""
        del self.added[name]
        self.sizes.pop(name, None)
        if self._pool == name:
            self._pool = None

    def check_removable(self, name: str) -> None:
        """Raise `PoolError` for a pool that this notebook has not added."""
        origin = self.settings.pools[name].origin
        if name not in self.added:
            raise PoolError(
                f"the pool {name} is built in, so it cannot be removed; `%distributed_pool stop {name}` ends its ranks."
                if origin == BUILT_IN
                else f"{name} comes from {origin}, not from this notebook."
            )
