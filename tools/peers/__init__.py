"""Ways to keep tensors on a device, as adapters of one shape: parts of tools/peer_compare.py.

`base`    what an adapter is, and memory fit for direct I/O
`files`   files on a file system: buffered, direct, safetensors, torch.save, DeepSpeed AIO
`raw`     on a device itself: blockkv, the two raw engines of LMCache, NIXL
`worker`  a process that carries one adapter out on request

Nothing here imports blockkv but the adapter for blockkv: a peer may live in a Python environment of its own.
"""

from __future__ import annotations

from peers.base import Peer
from peers.files import BufferedFiles, DeepSpeedAio, DirectFiles, Safetensors, TorchMmap, TorchSave
from peers.raw import BlockKV, LMCacheCore, LMCacheCorePosix, LMCacheEngine, NixlPosix

__all__ = ["PEERS"]

PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        BlockKV,
        LMCacheEngine,
        LMCacheCore,
        LMCacheCorePosix,
        NixlPosix,
        DeepSpeedAio,
        DirectFiles,
        Safetensors,
        TorchSave,
        TorchMmap,
        BufferedFiles,
    )
}
"""In the order of the table."""
