"""flash-dmattn's module of this name. It has no FlexAttention here: the function is None."""

__all__ = ["flex_dmattn_func"]

flex_dmattn_func = None
