"""Train image classifiers on all your GPUs with your own loop, straight from S3.

The public names are listed in ``__init__.pyi``. Each is imported at its first use: importing torch takes seconds, and
the command line must start at once.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
