"""A training step as one program: ``tpu_compile.train_step``."""
