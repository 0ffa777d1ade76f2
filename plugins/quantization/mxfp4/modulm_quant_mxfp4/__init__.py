"""MXFP4 expert weights for modulm, kept in 4 bits."""
