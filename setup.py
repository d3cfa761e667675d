"""Builds the native core; everything else is declared in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=["native/build.py:ffibuilder"],
    # cffi builds it against the stable ABI: one wheel for every Python from 3.11 on
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
