"""Where each token's bytes lie: tensors and engines' descriptions in, a `KVLayout` out. No I/O."""
