"""Expert weights in MXFP4, kept in four bits, for modulm."""
