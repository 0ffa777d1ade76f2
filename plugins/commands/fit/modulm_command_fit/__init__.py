"""`modulm fit`: what a model needs in memory."""
