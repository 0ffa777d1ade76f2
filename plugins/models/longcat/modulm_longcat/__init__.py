"""LongCat-Flash for modulm."""
