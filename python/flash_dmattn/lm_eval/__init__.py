"""Models with dynamic masks under the evaluation program lm-eval, without a network.

    python -m flash_dmattn.lm_eval FOLDER --to RESULTS.json

register() adds the model `flash_dmattn` to lm-eval's own, for programs that call lm-eval. Nothing
of lm-eval is imported before that.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version

__all__ = ["register"]

TESTED = "0.4.13"  # the version of lm-eval


def check_version(version: str | None) -> None:
    """Refuse a version of lm-eval that this package was not tested with, or None for no lm-eval.

    Raises:
        ImportError: the version is not supported.
    """
    if version != TESTED:
        raise ImportError(
            f"lm_eval: is {version or 'not installed'}, want {TESTED}; "
            f"`pip install 'lm_eval[hf,ruler]=={TESTED}'` installs it"
        )


def register() -> None:
    """Make the model `flash_dmattn` known to lm-eval, and hybrids and "dynamic_mask" to
    transformers. Calling it again has no effect.

    Raises:
        ImportError: a version of lm-eval or transformers that is not supported, or none.

    Example:
        flash_dmattn.lm_eval.register()
        given = {"pretrained": FOLDER}
        lm_eval.simple_evaluate(model="flash_dmattn", model_args=given, tasks=[...])
    """
    try:
        found: str | None = version("lm_eval")
    except PackageNotFoundError:
        found = None
    check_version(found)
    importlib.import_module(".model", __name__)
