"""What is on the device: geometry, superblock, pages, records, journal and checkpoint. See docs/format.md."""
