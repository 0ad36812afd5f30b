"""Warm starts: what a process that sees a graph again need not do again.

``index``     graph → lowered program: no lowering
``autograd``  Dynamo's graph → AOTAutograd's results, through torch's own cache: no tracing by AOTAutograd
``artifact``  what both ``autograd`` and ``tpu_compile.aot`` keep of a compiled graph

Each is keyed by all that decides what it stands for, the digest of our own ``sources`` included; where that cannot be
told (a rule of the user's, an argument without a text of its own), the work is done again.
"""
