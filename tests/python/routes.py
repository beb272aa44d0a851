"""Make calls take the dispatcher's way."""

from __future__ import annotations

from typing import Any

import pytest
from flash_dmattn import _call, _repeat


def forget(operator: Any, dispatch: Any, arguments: Any, named: Any) -> Any:
    """In place of _repeat.call_operator(): it remembers no call."""
    return dispatch(*arguments, **named)


def send_to_dispatcher(patch: pytest.MonkeyPatch) -> None:
    """All calls go through the dispatcher, and none is remembered, from before or for later."""
    patch.setattr(_repeat, "call_operator", forget)
    patch.setattr(_repeat, "repeat", lambda *_: NotImplemented)
    patch.setattr(_repeat, "NATIVE", None)
    patch.setattr(_call, "memory", _call.Memory())
