"""TPUs as a platform for modulm, through JAX. Importing this package does not import JAX."""
