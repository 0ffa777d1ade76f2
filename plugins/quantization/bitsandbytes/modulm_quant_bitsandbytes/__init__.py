"""bitsandbytes checkpoints, and quantization to its formats at load, for modulm."""
