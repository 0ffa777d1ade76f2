"""`modulm explain`: every choice that running a model involves, and why it falls so."""
