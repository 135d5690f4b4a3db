"""What strategies share that turn unchanged training code into distributed training. Runs in a rank's main thread.

conversion.py   the moments at which something has to be done: an optimizer is built, a backward pass, a loader is read
modules.py      whose parameters an optimizer has
replica.py      gradients are averaged by torch's own reducer (`ddp`)
agreement.py    ranks begin with the same weights, or say that they do not
objects.py      what ranks tell one another
loaders.py      which loaders are divided among the ranks
contents.py     whether the ranks hold the same data, or have divided it by hand
meetings.py     what they tell one another of that, and how long they wait for one another
shares.py       how one is divided
resuming.py     whole state dicts are loaded into what is sharded
decisions.py    losses that decide how the training goes on
witness.py      whether the ranks train together
patches.py      functions of torch that are replaced for the time of a run
places.py       which line of the user's it is about
"""
