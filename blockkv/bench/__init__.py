"""Measuring a store: beside fio, on the same device and in the same minutes, and as it ages.

`device`   devices to measure on: in memory held to the speed of a given drive, on a disk, divided
`fio`      runs fio and reads its report
`compare`  interleaved pairs of store and fio, ratios with their spread
`stress`   both in turn for hours, every byte verified
`ftl`      a model of what a drive makes of writes and discards

Speeds are in GB/s with 1 GB = 10**9 bytes, as drives are sold; CPU is that of the whole process, all threads.
"""
