"""`modulm explain`: the choices for running a model, with reasons."""
