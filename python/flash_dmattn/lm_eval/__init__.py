"""Models with dynamic masks under the evaluation program lm-eval, without a network.

    python -m flash_dmattn.lm_eval FOLDER --to RESULTS.json

register() adds the model `flash_dmattn` to lm-eval's own, for programs that call lm-eval. Nothing of
lm-eval is imported before that.
"""

from __future__ import annotations

__all__ = ["register"]

TESTED = "0.4.13"  # the version of lm-eval


def check_version(version: str) -> None:
    """Refuse a version of lm-eval that this package was not tested with.

    Raises:
        ImportError: the version is not supported.
    """
    if version != TESTED:
        raise ImportError(
            f"lm_eval: is {version}, want {TESTED}; `pip install lm_eval=={TESTED}` installs it"
        )


def register() -> None:
    """Make the model `flash_dmattn` known to lm-eval, and hybrids and "dynamic_mask" to
    transformers. Calling it again has no effect.

    Raises:
        ImportError: a version of lm-eval or transformers that is not supported, or none.

    Example:
        flash_dmattn.lm_eval.register()
        lm_eval.simple_evaluate(model="flash_dmattn", model_args={"pretrained": FOLDER}, tasks=[...])
    """
    from importlib.metadata import version

    check_version(version("lm_eval"))
    from . import model  # noqa: F401
