"""Where kernels are interpreted, triton 3.6 (of torch 2.11) does what 3.7 does: else numpy from 2.4 on refuses loops
whose ends the kernel has read.
"""

import os
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    _patch: Any = interpreter._patch_lang_tensor  # Any: triton has no types

    def _with_index(tensor: Any, scope: Any) -> None:
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))  # pyright: ignore[reportUnknownLambdaType]

    interpreter._patch_lang_tensor = _with_index
