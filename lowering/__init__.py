"""FX graphs of aten ops become StableHLO programs. It knows a platform family, and nothing else of any device.

``fx`` walks a graph, ``registry`` holds the rules, ``ops/`` has one family of rules a file, ``hlo`` one helper a
StableHLO operation.
"""

from tpu_compile.config import set_environment_default

# XLA reads it once, when jaxlib is loaded: without it every client announces its devices on stderr.
set_environment_default(TF_CPP_MIN_LOG_LEVEL="1")
