"""Which parts of the data zone are free. No I/O here."""
