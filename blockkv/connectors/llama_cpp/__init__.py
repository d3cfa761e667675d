"""llama.cpp on a store, by way of llama-cpp-python: sequences of a context, a cache for `Llama`, slot files.

::

    import llama_cpp
    from blockkv.connectors.llama_cpp import BlockKVCache, sharing_context

    with sharing_context():       # so that what prompts begin with is stored once
        llama = llama_cpp.Llama("model.gguf", n_ctx=8192)
    with BlockKVCache(llama, device="/dev/nvme1n1") as cache:
        cache.attach()
        llama.create_completion("...")

Who works with contexts of the C API uses `Sequences` and `Context`. See docs/connectors/llama_cpp.md.

Not here: llama-server, which has no place for a cache of others; its slot files can be exchanged
(`export_slot`, `import_slot`).
"""

from __future__ import annotations

from blockkv.connectors.llama_cpp.cache import BlockKVCache
from blockkv.connectors.llama_cpp.fingerprint import Context, family_of, file_digest
from blockkv.connectors.llama_cpp.sequences import Sequences, sharing_context, why_no_chunks
from blockkv.connectors.llama_cpp.slots import export_slot, import_slot

__all__ = [
    "BlockKVCache",
    "Context",
    "Sequences",
    "export_slot",
    "family_of",
    "file_digest",
    "import_slot",
    "sharing_context",
    "why_no_chunks",
]
