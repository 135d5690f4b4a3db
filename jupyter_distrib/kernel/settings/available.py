"""The strategies and the kinds of pools that a cell can ask for, with the options that each declares, and the answers
of a cell's strategy before it runs. No torch.

A strategy is one file in `strategies/`, a pool one file or folder in `pools/`; or a class of another package, which
declares it by an entry point.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import strategy
from jupyter_distrib.kernel.settings.cell_options import GroupSize, Options
from jupyter_distrib.options import Declared
from jupyter_distrib.pools import base

STRATEGIES: Declared = strategy.declared()
POOLS: Declared = base.kinds()
_SIZES = 1000
"""Maximum number of sizes of a worker group for which a strategy is asked whether it works."""


def for_strategy(options: Options, size: GroupSize) -> Options:
    """Return the options with those of their strategy in the form that ranks get, and with the strategy's variables.

    Raises:
        OptionsError, DistributedError: The strategy refuses the run.
    """
    name, given = options.strategy or "none", options.strategy_options
    start = strategy.StrategyStart(names=vars(sys.modules["__main__"]), ranks=size.count, on_cpu=not size.gpus)
    for ranks in size.several[:_SIZES] if size.least else ():
        try:
            strategy.ready(name, given, replace(start, ranks=ranks))
        except DistributedError as error:
            nodes = options.pool_options.get("nodes", "")
            flag, wanted = "--gpus" if size.gpus else "--ranks", options.gpus or options.ranks
            asked = f"--nodes {nodes}" if ":" in nodes else f"{flag} {wanted}"
            raise type(error)(
                f"{asked} may give {ranks} rank{'s' * (ranks > 1)}, which does not work: {error}"
            ) from None
    if (own := strategy.ready(name, given, start)) is not given:
        options = replace(options, strategy_options=dict(own))
    variables = strategy.environment(name, own)
    return replace(options, env={**variables, **options.env}) if variables else options
