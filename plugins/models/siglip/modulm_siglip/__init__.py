"""CLIP and SigLIP for modulm."""
