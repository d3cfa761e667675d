"""The way to the accelerator: what is read from a store goes on to it while more is read.

    stream = store.stream(keys, layout=layout, in_hand=4)
    with Pipeline(stream, CudaCopier()) as pipeline:
        for layer, tensors in pipeline:      # CUDA tensors, ready for the current stream
            attend(layer, tensors)

Everything here imports without CUDA. `choose` says which way there is, and why; so does `store.info()`.
"""

from blockkv.gpu.choice import Way, choose
from blockkv.gpu.copiers import Copier, CudaCopier, PacedCopier, Ticket
from blockkv.gpu.pipeline import Pipeline

__all__ = ["Copier", "CudaCopier", "PacedCopier", "Pipeline", "Ticket", "Way", "choose"]
