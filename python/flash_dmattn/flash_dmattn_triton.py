"""flash-dmattn's module of this name. Its Triton kernels are not here: the function is None."""

__all__ = ["triton_dmattn_func"]

triton_dmattn_func = None
