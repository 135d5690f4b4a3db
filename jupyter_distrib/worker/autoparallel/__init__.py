"""The shared parts of strategies that turn unchanged training code into distributed training. Runs in a rank's main
thread.

training/   hooks.py              the moments to act: an optimizer is built, a backward pass begins, a loader is read
            gradient_reducer.py   the averaging of gradients by torch's own reducer (`ddp`)
            sharding.py           the sharding of a module by torch's FSDP2 (`fsdp`, `tp`), and of state dicts it loads
            weight_sync.py        the check that ranks begin with the same weights, and the exchange of weights
            device_remapping.py   the replacement of `cuda:0` in a cell for one device
data/       loaders.py            the choice of the loaders that are divided among the ranks, and this rank's shares
            shard_samplers.py     the division of a loader
            fingerprint.py        the check whether the ranks hold the same data, or have divided it by hand
            consensus.py          the messages and the waits of the ranks for that check
checks/     training_checks.py    the checks of a cell's training, and the notes on it
            divergence.py         the check whether the ranks train together
            sum_losses.py         the recognition of losses that are sums over a batch
            own_updates.py        the check whether a cell trains tensors by its own code beside its models
            step_counts.py        the check whether the ranks make the same steps
            tensor_sums.py        the sums by which ranks compare tensors
ownership.py           the modules that own an optimizer's parameters
object_collectives.py  the exchange of values between ranks
traced.py              what `torch.compile` traces in the code of a model
heuristics.py          the heuristics about a cell, and the option that switches them off
patches.py             the functions of torch that are replaced for the time of a run
source_location.py     the line and the loop of the user's code for a note
"""
