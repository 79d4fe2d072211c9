"""Hybrid data parallelism (ByteScale, arXiv 2502.21231) for Megatron-Core.

Importing this package changes nothing and loads neither torch nor megatron; a run turns the plugin
on with ``--hybrid-data-parallel``.
"""

__version__ = "0.1.0"
