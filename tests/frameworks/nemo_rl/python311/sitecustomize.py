"""On PYTHONPATH of NeMo-RL's tests under Python 3.11, in Ray's workers too.

NeMo-RL requires Python 3.13, and validates classes of `typing.TypedDict` with pydantic, which accepts these from
Python 3.12 on. With Python 3.11 pydantic demands the class of `typing_extensions`.
"""

import sys
import typing

if sys.version_info < (3, 12):
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict
