"""The `tpu` device of torch, in Python: eager ops run the rules of the compiler, one op at a time."""
