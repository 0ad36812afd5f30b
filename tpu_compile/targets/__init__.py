"""What a program will do on a TPU that is not here, read from libtpu's own output: time, memory, and where it goes."""
