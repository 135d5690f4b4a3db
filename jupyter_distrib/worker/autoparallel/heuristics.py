"""Heuristics about the meaning of a cell where its code does not state it. Each has an entry in this file, is covered
by a test, and can be switched off by `--no-guess NAME`. Read in the kernel, too, so without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.options import shown

Name: TypeAlias = Literal[
    "divided-data",
    "reads-rank",
    "knows-ranks",
    "order",
    "old-optimizers",
    "local-variables",
    "units",
    "first-device",
]
Heuristics: TypeAlias = frozenset[Name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heuristic:
    """One heuristic, in the words of docs/strategies.md."""

    what: str
    without: str
    """The behaviour if it is switched off."""
    place: str
    """Its module in this folder, and its function or class there."""
    test: str
    """The test that covers it: file and function below `tests/`."""


HEURISTICS: Mapping[Name, Heuristic] = {
    "divided-data": Heuristic(
        what="a cell whose code has a name such as `world_size` in it may have divided its data before the loader was "
        "made; the ranks then compare samples of what they hold",
        without="data of which the ranks hold different samples is divided once more, without a note",
        place="data/fingerprint.py: _asks_size",
        test="strategies/test_ddp.py: test_what_is_done_by_hand_already_is_left_alone",
    ),
    "reads-rank": Heuristic(
        what="a data set whose bytecode reads `rank`, `RANK` or `get_rank` divides itself, and so does a stream that "
        "holds one",
        without="it is divided like any other",
        place="data/fingerprint.py: reads_ranks",
        test="worker/autoparallel/test_data_fingerprint.py: test_who_asks_for_the_rank_divides_by_itself",
    ),
    "knows-ranks": Heuristic(
        what="a sampler or data set with attributes such as `rank` and `num_replicas` is a share already",
        without="only torch's `DistributedSampler`, and samplers of known libraries, are",
        place="data/shard_samplers.py: _knows_ranks",
        test="worker/autoparallel/test_heuristics.py: test_attributes_tell_that_a_sampler_knows_of_ranks",
    ),
    "order": Heuristic(
        what="if ranks wait for one another at two loaders, the ranks at the line further up continue",
        without="they wait 10 s, then all continue",
        place="data/consensus.py: _order",
        test="strategies/test_ddp.py: test_a_loader_that_one_rank_reads_keeps_nobody_waiting",
    ),
    "old-optimizers": Heuristic(
        what="optimizers that were there before the cell are found through the garbage collector, and belong to the "
        "cell if one of its variables leads to them",
        without="only optimizers that the cell builds, or gives to `prepare`, train together",
        place="training/hooks.py: find_optimizers",
        test="strategies/test_ddp.py: test_kept_models_go_on_where_they_were_and_epochs_too",
    ),
    "local-variables": Heuristic(
        what="local variables of functions that are being executed get the sharded parameters, before Python 3.13 "
        "through its C interface",
        without="they keep the old ones, which no gradient reaches",
        place="training/replace_references.py: _replace_locals",
        test="worker/autoparallel/test_replace_references.py: test_every_holder_gets_the_new_one",
    ),
    "units": Heuristic(
        what="large blocks that a model repeats are gathered and freed one at a time",
        without="the whole model at once, unless `--fsdp-unit` names a class",
        place="training/units.py: _repeated",
        test="worker/autoparallel/test_units.py: test_the_blocks_that_are_repeated_if_they_are_large",
    ),
    "first-device": Heuristic(
        what="`cuda:0` in the cell, and 0 in `torch.device`, `.to(0)`, `.cuda(0)` and `set_device(0)`, mean "
        "each rank's own GPU",
        without="they mean the first GPU of the node",
        place="training/device_remapping.py: DeviceRemapping",
        test="worker/autoparallel/test_device_remapping.py: test_a_cell_that_names_the_first_gpu_gets_its_own",
    ),
}


def parse_names(name: str, text: str) -> tuple[Name, ...]:
    """Parse the value of the option: names of heuristics, joined by commas."""
    given = [part.strip() for part in text.split(",")]
    names = [each for each in get_args(Name) if each in given]
    if set(given) - set(names):
        raise OptionsError(
            f"{name} must be one or more of {', '.join(HEURISTICS)}, joined by commas; got {shown(text)}"
        )
    return tuple(names)


def enabled(options: Mapping[str, str]) -> Heuristics:
    """Return the heuristics that are enabled in a run.

    Args:
        options: The options of its strategy, as texts.
    """
    left_out = options.get("no_guess")
    return frozenset(HEURISTICS) - frozenset(parse_names("--no-guess", left_out) if left_out else ())


def table() -> str:
    """Return the table of docs/strategies.md."""
    rows = [f"| `{name}` | {each.what} | {each.without} |" for name, each in HEURISTICS.items()]
    return "\n".join(["| name | what is guessed | without it |", "|---|---|---|", *rows])
