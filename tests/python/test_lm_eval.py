"""The command for lm-eval as far as it needs no lm-eval. tests/lm_eval has the rest."""

from __future__ import annotations

import flash_dmattn.lm_eval
import pytest
from programs import output_of, python


def test_nothing_is_imported_before_register() -> None:
    code = "import sys, flash_dmattn.lm_eval; print({'lm_eval', 'transformers'} & {*sys.modules})"
    assert output_of(python("-c", code)).strip() == "set()"


@pytest.mark.parametrize("version, said", [("0.4.12", "0.4.12"), (None, "not installed")])
def test_other_versions(monkeypatch: pytest.MonkeyPatch, version: str | None, said: str) -> None:
    def find(_: str) -> str:
        if version is None:
            raise flash_dmattn.lm_eval.PackageNotFoundError
        return version

    monkeypatch.setattr(flash_dmattn.lm_eval, "version", find)
    wanted = rf"lm_eval: is {said}, want 0.4.13; `pip install 'lm_eval\[hf,ruler\]==0.4.13'`"
    with pytest.raises(ImportError, match=wanted):
        flash_dmattn.lm_eval.register()


@pytest.mark.parametrize(
    "words, message",
    [
        (["FOLDER"], "the following arguments are required: --to"),
        (["FOLDER", "--to", "f", "--samples", "0"], "--samples: is 0, want 1 or more"),
        (["FOLDER", "--to", "f", "--lengths", "64"], "--lengths: has 64, want 256 or more"),
    ],
)
def test_arguments(words: list[str], message: str) -> None:
    done = python("-m", "flash_dmattn.lm_eval", *words)
    assert done.returncode == 2 and message in done.stderr


def test_a_device_that_is_not_there() -> None:
    done = python("-m", "flash_dmattn.lm_eval", "FOLDER", "--to", "f", "--device", "cuda:99")
    wanted = (
        "flash_dmattn.lm_eval: device: is cuda:99, want a device on which PyTorch makes tensors"
    )
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(wanted)
