"""Makes the interpreter of triton 3.6 (torch 2.11) behave like that of 3.7: with numpy 2.4 and later, 3.6 refuses loops
whose bounds the kernel has loaded.
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
