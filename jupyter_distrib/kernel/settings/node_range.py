"""The range of ranks that `--nodes 1:4` gives: the number of ranks is that on all four nodes, and each has the same
number. Kernel side; standard library only, no state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.settings.cell_options import GroupSize, Options, refuse_conflicts_of_range
from jupyter_distrib.options import NumberRange, count_or_range


def in_ranks(options: Options, *, of_pool: bool) -> Options:
    """Return options with the range of ranks that a range of nodes gives, as far as the number of ranks suits it.

    Args:
        options: The options, completed with all defaults.
        of_pool: Whether the range is the pool's and the number of ranks the cell's own: one that does not suit it is
            on as few nodes as possible.
    """
    nodes = _nodes(options)
    if nodes is None or options.on or not (size := options.size).count:
        return options
    if not (size.least or size.count % nodes):
        return options.resized(_of(size, nodes))
    given = {name: value for name, value in options.pool_options.items() if not (of_pool and name == "nodes")}
    return replace(options, pool_options=given)


def check(given: Options, filled: Options) -> None:
    """Raise `OptionsError` if the number of ranks does not suit a range of nodes, or does not grow though it should.

    Args:
        given: The options of the cell.
        filled: The same, completed with all defaults, as by `in_ranks`.
    """
    nodes = _nodes(filled)
    if nodes is None or (given.on and "nodes" not in given.pool_options):
        if given.grow_after_s and not filled.size.least:
            raise OptionsError(
                "--grow-after needs a range of ranks, such as --ranks 2:8: a cell with a fixed number does not grow"
            )
        return
    wanted, most, size = f"--nodes {nodes}", int(nodes), filled.size
    if not size.count:
        raise OptionsError(f"{wanted} needs --gpus N or --ranks N, the number of ranks on all {most} nodes")
    _check_size(size, nodes, wanted, lambda value: f"--{'gpus' if size.gpus else 'ranks'} {value}".rstrip())
    if "nodes" in given.pool_options:
        least = nodes.least * size.count // most
        refuse_conflicts_of_range(given, wanted, least, lambda name: f"--{name.replace('_', '-')}")


def check_pool(size: GroupSize, nodes: object) -> None:
    """Raise `OptionsError` if the size of a pool in a settings file does not suit its `nodes`."""
    if isinstance(nodes, NumberRange) and size.count:
        name = "gpus" if size.gpus else "ranks"
        _check_size(size, nodes, f"nodes = '{nodes}'", lambda value: f"{name} = '{value}'" if value else name)


def _check_size(size: GroupSize, nodes: NumberRange, wanted: str, say: Callable[[str], str]) -> None:
    """Raise `OptionsError` for a number of ranks that is not the same on each of these nodes.

    Args:
        size: The size.
        nodes: The range.
        wanted: The range, as the user writes it.
        say: Returns the option of the size with this value, or its name alone for an empty one, as the user writes it.
    """
    assert size.count
    if size.count % nodes:
        raise OptionsError(
            f"{wanted} puts the same number of ranks on each node, so {say('')} must be a multiple of {int(nodes)}; "
            f"got {size.count}"
        )
    if size.least and size != _of(size, nodes):
        given = NumberRange(size.count, size.least, size.step)
        raise OptionsError(
            f"{wanted} and {say(str(given))} exclude each other: give {say('')} the number of ranks on all "
            f"{int(nodes)} nodes"
        )


def _nodes(options: Options) -> NumberRange | None:
    given = str(options.pool_options.get("nodes", ""))  # a kind of pool may read its own option as a number
    nodes = count_or_range("--nodes", given) if ":" in given else 1
    return nodes if isinstance(nodes, NumberRange) else None


def _of(size: GroupSize, nodes: NumberRange) -> GroupSize:
    on_each = (size.count or 0) // nodes
    return replace(size, least=nodes.least * on_each, step=nodes.step * on_each)
