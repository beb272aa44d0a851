"""flash-dmattn's package of this name: masks of the best keys, and padding."""
