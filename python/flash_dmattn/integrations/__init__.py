"""flash-dmattn's package of this name: the attention of a layer, as transformers calls it."""
