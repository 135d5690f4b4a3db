"""The shared parts of strategies that turn unchanged training code into distributed training. Runs in a rank's main
thread.

hooks.py               when something has to be done: an optimizer is built, a backward pass, a loader is read
ownership.py           whose parameters an optimizer has
gradient_reducer.py    gradients are averaged by torch's own reducer (`ddp`)
sharding.py            a module is sharded by torch's FSDP2 (`fsdp`, `tp`)
weight_sync.py         ranks begin with the same weights, or say that they do not
object_collectives.py  what ranks tell one another
loaders.py             which loaders are divided among the ranks
loader_shares.py       this rank's shares of them
division_by_others.py  whether somebody else has divided one
data_fingerprint.py    whether the ranks hold the same data, or have divided it by hand
data_consensus.py      what they tell one another of that, and how long they wait for one another
shard_samplers.py      how one is divided
state_dict_loading.py  whole state dicts are loaded into what is sharded
loss_averaging.py      losses that decide how the training goes on
tensor_sums.py         sums by which ranks compare what they hold
training_checks.py     how a cell has trained, and what is said of it
divergence.py          whether the ranks train together
loss_reduction.py      whether a loss is a sum over its batch
own_device.py          `cuda:0` of a cell for one device
guesses.py             what is guessed of a cell, and how it is switched off
patches.py             functions of torch that are replaced for the time of a run
source_location.py     which line of the user's it is about
"""
