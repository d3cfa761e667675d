"""Builds the native core; everything else is declared in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["native/build.py:ffibuilder"])
