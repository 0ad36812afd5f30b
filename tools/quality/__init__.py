"""Networks for `tpu_quality.py`, in PyTorch and in JAX."""
