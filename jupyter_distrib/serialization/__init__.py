"""Values as bytes: pickling, tensors, and shared memory. Any process."""
