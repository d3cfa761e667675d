"""Which chunks exist and which one leaves next. No I/O here."""
