"""The range of ranks that `--nodes 1:4` gives: the number of ranks is that on all four nodes, and each has the same
number. Kernel side; standard library only, no state."""

from __future__ import annotations

from dataclasses import replace

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.settings.cell_options import GroupSize, Options, refuse_conflicts_of_range
from jupyter_distrib.options import NumberRange, count_or_range


def in_ranks(options: Options) -> Options:
    """Return options with the range of ranks that a range of nodes gives, as far as the number of ranks suits it."""
    nodes, size = _nodes(options), options.size
    if nodes is None or size.least or not size.count or size.count % nodes:
        return options
    return options.resized(_of(size, nodes))


def check(given: Options, filled: Options) -> None:
    """Raise `OptionsError` if the number of ranks does not suit a range of nodes, or does not grow though it should.

    Args:
        given: The options of the cell.
        filled: The same, completed with all defaults, as by `in_ranks`.
    """
    nodes, size = _nodes(filled), filled.size
    if nodes is None:
        if given.grow_after_s and not size.least:
            raise OptionsError(
                "--grow-after needs a range of ranks, such as --ranks 2:8: a cell with a fixed number does not grow"
            )
        return
    flag = "--gpus" if size.gpus else "--ranks"
    told, most = f"--nodes {nodes}", int(nodes)
    if not size.count:
        raise OptionsError(f"{told} needs --gpus N or --ranks N, the number of ranks on all {most} nodes")
    if size.count % most:
        raise OptionsError(
            f"{told} puts the same number of ranks on each node, so {flag} must be a multiple of {most}; "
            f"got {size.count}"
        )
    if size != _of(size, nodes):
        raise OptionsError(
            f"{told} and {flag} {filled.gpus or filled.ranks} exclude each other: give {flag} the number of ranks on "
            f"all {most} nodes"
        )
    if "nodes" in given.pool_options:
        least = nodes.least * size.count // most
        refuse_conflicts_of_range(given, told, least, lambda name: f"--{name.replace('_', '-')}")


def _nodes(options: Options) -> NumberRange | None:
    given = str(options.pool_options.get("nodes", ""))  # a kind of pool may read its own option as a number
    nodes = count_or_range("--nodes", given) if ":" in given else 1
    return nodes if isinstance(nodes, NumberRange) else None


def _of(size: GroupSize, nodes: NumberRange) -> GroupSize:
    on_each = (size.count or 0) // nodes
    return replace(size, least=nodes.least * on_each, step=nodes.step * on_each)
