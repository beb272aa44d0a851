"""The extension module _native: its work for a device, its refusals, where it is found, and the
results that repeated calls leave out."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any, Callable

import flash_dmattn
import pytest
import torch
from flash_dmattn import _call, _library, _repeat

NATIVE = _repeat.NATIVE
pytestmark = pytest.mark.skipif(NATIVE is None, reason="there is no extension module")
Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
DEVICE = 3  # need not exist: PyTorch's functions for devices are replaced


def broken(*arguments: Any) -> Any:
    raise KeyError("broken")


class Fake:
    """A call of a C function that only reads `words`, and its DirectCall. It is made `steps` times.
    All but the last raise KeyError if they fail."""

    def __init__(self, steps: int = 1, fail: Any = None, **changes: Any) -> None:
        self.words = (ctypes.c_uint64 * 8)()
        self.seen: list[list[int]] = []
        self.status, self.current, self.where = 0, DEVICE, ""
        self.failing = 0  # the number of the call that fails, 0: every one
        self.function = Function(self.look)
        address = ctypes.addressof(self.words)
        at_word = [address + 8 * at for at in range(8)]
        allocators = (self.allocator("current"), self.allocator("elsewhere"))
        current, stream = lambda: self.current, lambda index: 1000 + index  # noqa: E731
        function = ctypes.cast(self.function, ctypes.c_void_p).value
        fails = [broken] * (steps - 1) + [fail or self.fail]
        plan = {
            "prepared": self,
            "steps": tuple((function, address, one, at_word[7], at_word[5]) for one in fails),
            "guard": lambda *given: all(x.dtype == torch.float32 for x in given),
            "apply": None,
            "allocators": allocators,
            "device": (DEVICE, current, stream),
            "addresses": (torch.Tensor.data_ptr, _repeat.DATA_PTR, *_repeat.PLAIN_TYPES),
            "inputs": ((0, 0), (2, 0)),
            "outputs": ((((4,), (1,), torch.float32), True), (((64,), (1,), torch.uint8), False)),
            "targets": ((at_word[0], 0, 0), (at_word[1], 1, 8), (at_word[2], 2, 0),
                        (at_word[3], 3, 16), (at_word[4], 3, 32)),
            "count": 1,
            "kept": (),
        }  # fmt: skip
        self.native = NATIVE.Call(*{**plan, **changes}.values())

    def allocator(self, where: str) -> Callable[..., torch.Tensor]:
        def allocate(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
            self.where = where
            return torch.empty_strided(shape, stride, dtype=dtype)

        return allocate

    def look(self, args: int) -> int:
        assert args == ctypes.addressof(self.words)
        self.seen.append(list(self.words))
        return self.status if self.failing in (0, len(self.seen)) else 0

    def fail(self, status: int) -> None:
        raise ArithmeticError(f"status {status}")

    def repeat(self, *arguments: Any) -> Any:
        count = sum(x is None or isinstance(x, torch.Tensor) for x in arguments)
        key = NATIVE.make_key("fake", arguments, count)
        _call.memory.direct[key] = [self]
        try:
            return NATIVE.repeat("fake", arguments, count)
        finally:
            del _call.memory.direct[key]


def test_words_and_results() -> None:
    fake, one, other = Fake(), torch.ones(4), torch.nn.Parameter(torch.ones(4))
    result = fake.repeat(one, None, other, 1, "exp")
    ((*words, stream),) = fake.seen
    assert words[:3] == [one.data_ptr(), other.data_ptr() + 8, result.data_ptr()]
    assert words[4] - words[3] == 16 and words[3] % 16 == 0
    assert stream == 1000 + DEVICE
    assert torch.equal(result, torch.zeros(4))  # it is cleared


def test_allocators_of_devices() -> None:
    fake, one = Fake(), torch.ones(4)
    for fake.current, where in ((DEVICE, "current"), (0, "elsewhere"), (DEVICE, "current")):
        fake.repeat(one, None, one)
        assert fake.where == where
        trusted = ctypes.c_int32.from_address(ctypes.addressof(fake.words) + 8 * 5).value
        assert trusted == (where == "current")


def test_several_steps() -> None:
    """They see the same addresses. The one that fails says so, and no later one is made."""
    fake, one = Fake(steps=3), torch.ones(4)
    fake.repeat(one, None, one)
    assert len(fake.seen) == 3 and all(words == fake.seen[0] for words in fake.seen)
    for failing, error in ((1, KeyError), (2, KeyError), (3, ArithmeticError)):
        fake = Fake(steps=3)
        fake.status, fake.failing = 2, failing
        with pytest.raises(error):
            fake.repeat(one, None, one)
        assert len(fake.seen) == failing


def test_results() -> None:
    one = torch.ones(4)
    assert Fake(count=0).repeat(one, None, one) is None
    first, second = Fake(count=2).repeat(one, None, one)
    assert first.numel() == 4 and second.numel() == 64


def test_what_does_not_fit() -> None:
    fake, one = Fake(), torch.ones(8)
    assert fake.repeat(one, None, one.double()) is NotImplemented
    assert fake.repeat(one, None, one[1:5]) is NotImplemented  # alignment
    assert fake.repeat(one[4:], None, one) is not NotImplemented
    assert len(fake.seen) == 1


def test_failures_raise() -> None:
    fake, one = Fake(), torch.ones(4)
    fake.status = 2
    with pytest.raises(ArithmeticError, match="status 2"):
        fake.repeat(one, None, one)
    with pytest.raises(RuntimeError, match="the call failed with status 2"):
        quiet = Fake(fail=lambda status: None)
        quiet.status = 2
        quiet.repeat(one, None, one)

    for changes in (
        {"guard": broken},
        {"allocators": (broken, broken)},
        {"device": (DEVICE, broken, lambda index: 0)},
        {"device": (DEVICE, lambda: 0, broken)},
        {"addresses": (broken, 0, torch.Tensor, torch.Tensor)},
        {"apply": broken},
    ):
        with pytest.raises(KeyError, match="broken"):
            Fake(**changes).repeat(one, None, one)
    unlike = Fake()
    unlike.native = None
    with pytest.raises(TypeError, match="native: is no Call"):
        unlike.repeat(one, None, one)


def test_plans_are_checked() -> None:
    with pytest.raises(TypeError, match="12 arguments"):
        NATIVE.Call(None)
    with pytest.raises(ValueError, match="inputs: are 33, want at most 32"):
        Fake(inputs=((0, 0),) * 33)
    with pytest.raises(ValueError, match="outputs: are 17, want at most 16"):
        Fake(outputs=(((), False),) * 17)
    with pytest.raises(ValueError, match="targets: 4 is the number of no tensor"):
        Fake(targets=((0, 4, 0),))
    with pytest.raises(ValueError, match="steps: are 4, want at most 3"):
        Fake(steps=4)
    with pytest.raises(ValueError, match="targets: are 65, want at most 64"):
        Fake(targets=((0, 0, 0),) * 65)
    with pytest.raises(TypeError):
        Fake(inputs=((0, 0, 0),))


def test_keys() -> None:
    """Equal numbers of different types have different keys; other types have none."""
    tensor, other = torch.ones(1), torch.ones(1)

    def key(*arguments: Any, count: int = 1) -> Any:
        return NATIVE.make_key("head", arguments, count)

    assert key(tensor, 1, "x") == key(other, 1, "x")
    keys = [key(tensor, 1), key(tensor, 1.0), key(tensor, True), key(None, 1), key(tensor, 1, None)]
    keys += [key(tensor, 0), key(tensor, None), key(tensor, "1"), key(tensor, tensor, count=2)]
    with torch.no_grad():
        keys.append(key(tensor, 1))
    assert len(set(keys)) == len(keys)
    assert key(tensor, torch.float32) is key(tensor, tensor) is key(tensor, [1]) is None
    assert key(*[None] * 33, count=33) is None
    with pytest.raises(TypeError):
        NATIVE.make_key("head", [tensor], 1)
    with pytest.raises(TypeError):
        NATIVE.repeat("head")
    with pytest.raises(TypeError, match="a context and a direct call"):
        NATIVE.record(None)
    with pytest.raises(RuntimeError, match="was called before"):
        NATIVE.configure()


def test_operators_that_bypass_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """They repeat calls of the shapes that they are remembered by, and have others made otherwise.
    Errors of a repeated call are raised."""
    monkeypatch.setattr(_call, "memory", _call.Memory())
    others: list[Any] = []
    operator = NATIVE.bypass("fake", lambda *args, **named: others.append((args, named)), 3, 2)
    fake, one, two = Fake(count=2), torch.ones(4), torch.ones(2, 2)
    key = NATIVE.make_key(("fake", one.shape, two.shape), (one, None, two, 1), 3)
    _call.memory.direct[key] = [fake]
    outputs = operator(one, None, two, 1)
    assert [x.numel() for x in outputs] == [4, 64] and fake.seen[0][0] == one.data_ptr()
    calls: list[Any] = [(one, None, one, 1), (two, None, two, 1), (one, None, two, 2)]
    calls += [(one, None, two, 1.0), ("text", None, two, 1), (one, None), ()]
    for arguments in calls:
        assert operator(*arguments) is None
    assert operator(one, None, two, option=1) is None
    assert len(fake.seen) == 1
    assert [len(args) for args, _ in others] == [len(call) for call in calls] + [3]
    assert others[0][0][0] is one and others[-1][1] == {"option": 1}
    fake.status = 2
    with pytest.raises(ArithmeticError, match="status 2"):
        operator(one, None, two, 1)
    with pytest.raises(TypeError):
        NATIVE.bypass("fake")


def test_where_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the library; a module of another version or another file is not taken."""
    file = Path(NATIVE.__spec__.origin)
    assert file.name == _repeat.FILE
    assert _repeat.load_native() is NATIVE  # loaded once per process
    monkeypatch.delitem(_repeat.sys.modules, _repeat.NAME)
    monkeypatch.setattr(_library, "find", lambda: tmp_path / "libfdma.so")
    monkeypatch.setattr(_repeat.sys.modules["flash_dmattn"], "__path__", [str(tmp_path)])
    assert _repeat.load_native() is None
    (tmp_path / _repeat.FILE).write_text("not a module")
    assert _repeat.load_native() is None
    (tmp_path / _repeat.FILE).unlink()
    shutil.copy(file, tmp_path / _repeat.FILE)
    with monkeypatch.context() as patch:
        patch.setattr(_repeat, "INTERFACE", NATIVE.INTERFACE + 1)
        assert _repeat.load_native() is None
    found = _repeat.load_native()
    assert found.INTERFACE == _repeat.INTERFACE
    for function in (found.repeat, found.make_key, found.bypass):
        with pytest.raises(RuntimeError, match="has to be called first"):
            function("head", (), 0)
    monkeypatch.setitem(_repeat.sys.modules, _repeat.NAME, NATIVE)


def test_absent_gradients_are_not_made() -> None:
    _call.memory.direct.clear()
    leaves = [torch.randn(1, 8, 2, 8, requires_grad=True) for _ in "qkv"]
    leaves += [torch.randn(2, 16, requires_grad=True), torch.ones(2, requires_grad=True)]
    out = flash_dmattn.flash_dma_attention(*leaves, 4)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    known = {call for calls in _call.memory.direct.values() for call in calls}
    (backward,) = (call for call in known if call.record is None)
    names = ("dquery", "dkey", "dvalue", "ddt_proj", "da_coef")  # dt_bias and sink_logit are None
    assert backward.prepared.operation.results == names
