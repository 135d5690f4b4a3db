"""The conversion of values to bytes: pickling, tensors, and shared memory. Any process."""
