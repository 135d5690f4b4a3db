"""A queued cell, whose order is carried out later."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from jupyter_distrib.kernel.session.cell_order import CellRequest, Order
from jupyter_distrib.kernel.settings.cell_options import Options
from jupyter_distrib.serialization import payload
from jupyter_distrib.wire import messages as m


def test_a_queued_order_has_copies_and_keeps_no_value_of_the_notebook() -> None:
    value = np.zeros(1_000_000)
    released = weakref.ref(value)
    request = CellRequest(
        cell=m.Cell(source="x", filename="Cell In[1]"),
        inputs=payload.pack_inputs({"x": value}, {}),
        options=Options(),
        label="Cell In[1]",
    )
    queued = Order(request=request, options=Options(track=()), origins="").as_it_is_now(remote=False)
    del value, request
    gc.collect()

    assert released() is None
    parcel, content = queued.content()
    assert content is not None
    assert sum(parcel.sizes) == 8_000_000
    assert queued.request.label == "Cell In[1]"
    queued.drop()
