"""A queued cell, whose order is carried out later."""

from __future__ import annotations

import gc
import os
import weakref

import numpy as np

from jupyter_distrib.kernel.session.cell_order import CellRequest, Order
from jupyter_distrib.kernel.settings.cell_options import DEFAULT_POOL, Options
from jupyter_distrib.kernel.settings.settings import without_files
from jupyter_distrib.serialization import payload
from jupyter_distrib.serialization.value_cache import ValueCache
from jupyter_distrib.wire import messages as m


def test_a_queued_order_has_copies_and_keeps_no_value_of_the_notebook() -> None:
    value, cache = np.zeros(1_000_000), ValueCache()
    released = weakref.ref(value)
    options = without_files({DEFAULT_POOL: []}, {}).completed(Options())
    request = CellRequest(
        cell=m.Cell(source="x", filename="Cell In[1]"),
        inputs=payload.pack_inputs({"x": value}, {}),
        options=options,
        label="Cell In[1]",
    )
    order = Order.of(request, ())
    queued = order.as_it_is_now(cache)
    del value, request, order
    gc.collect()

    assert released() is None
    outgoing = queued.outgoing(cache)
    assert sum(outgoing.parcel.sizes) == 8_000_000
    with outgoing.descriptors() as descriptors:
        assert [os.fstat(fd).st_size for fd in descriptors] == [8_000_000]
    assert queued.request.label == "Cell In[1]"
    queued.drop()
    cache.clear()
