"""StarCoder and SantaCoder for modulm."""
