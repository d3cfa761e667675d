"""`blockkv demo`: a real model's KV cache through a kill, a real trace, and fio beside it.

  prefix.py  chained keys over token ids        model.py   the Llama, its prefill and its KV cache
  worker.py  the processes that get killed      resume.py  the story of stage two, told by the parent
  replay.py  a trace against a store            run.py     all stages, one result

Nothing here is imported by the library. `model` and `worker` need transformers (the `demo` extra).
"""
