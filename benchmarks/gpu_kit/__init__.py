"""The check of everything that only a machine with an NVIDIA GPU can show; `sh .ci/gpu` runs it."""
