"""One open store for many processes: the catalog's owner, and stores that are clients of one.

Control and data are apart. Keys, extents, leases, checksums and layouts go over a Unix socket; bytes go
between the memory of a client and the device, on a ring of the client's own. See docs/serving.md.
"""
