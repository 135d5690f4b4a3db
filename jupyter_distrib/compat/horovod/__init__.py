"""Horovod's interface for PyTorch over torch.distributed; `torch.py` has all its names.

Horovod lets ranks issue operations in different orders and pairs them by name, and torch pairs them by order. So
ranks first exchange the names of their operations (`negotiation.py`), and execute the operations that all of them
have issued in an order that is the same everywhere (`operations.py`). There is no background thread: a rank
negotiates when it waits for a result or polls for one. Ranks only, except for calls of a notebook, which is a single
process.
"""
