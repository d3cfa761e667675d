"""Anything that holds bytes: real namespaces and files through the native engine, and a simulated one."""
