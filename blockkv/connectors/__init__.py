"""Adapters that put blockkv under an engine: one module for each, which imports that engine and no other.

`blockkv.connectors.vllm`, `.lmcache`, `.sglang`, `.transformers` and `.llama_cpp` are named in the
configuration of their engine; see docs/connectors.md. This package itself imports none of them.

Invariants
  * adapters use the public API only;
  * what the engine's own key leaves out (model, weights, dtype, layout, ranks) is in ours, by a
    `blockkv.Family`, or the engine is refused by name;
  * a chunk that is gone, damaged or late is a miss to the engine, and never an error that stops it.
"""
