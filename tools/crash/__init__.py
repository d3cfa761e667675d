"""Parts of tools/crash_explorer.py."""
