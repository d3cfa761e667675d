"""The L2 tier of LMCache's multiprocess server: an adapter, and a connector for its native door.

::

    lmcache server --l2-adapter '{"type": "plugin", "module_path": "blockkv.connectors.lmcache",
        "class_name": "BlockKVL2Adapter",
        "adapter_params": {"device": "/dev/nvme1n1", "weights": {"llama-3.1-8b": "0e9e39f2"}}}'

| file | what it decides |
|---|---|
| `adapter.py` | what LMCache is told, and when |
| `books.py` | which objects are in the store, and what LMCache counts |
| `config.py` | the options |
| `locks.py` | how long a key that was looked up stays |
| `names.py` | which objects may be exchanged, and what their chunks are called |
| `native.py` | the same store through `native_plugin` |

Not here: the in-process mode of LMCache, which it has deprecated; see docs/connectors/lmcache.md.
"""

from blockkv.connectors.lmcache.adapter import BlockKVL2Adapter
from blockkv.connectors.lmcache.config import BlockKVL2AdapterConfig
from blockkv.connectors.lmcache.native import BlockKVConnector

__all__ = ["BlockKVConnector", "BlockKVL2Adapter", "BlockKVL2AdapterConfig"]
