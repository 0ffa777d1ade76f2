"""modulm quantize: quantizes a checkpoint into the compressed-tensors format."""
