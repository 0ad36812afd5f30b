"""Programs as files: ``tpu_compile.export`` writes one, ``tpu_compile.load`` runs it without the model's code.

tracing (the model as one graph) → graphs, programs (what is written of it) → archive (the file) → session (a call).
A file is data: JSON, versioned StableHLO, safetensors. Nothing in it is unpickled, imported or evaluated.
"""
