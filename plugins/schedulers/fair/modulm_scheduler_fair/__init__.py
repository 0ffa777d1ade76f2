"""Fair shares of the engine: tokens computed for each tenant follow the weights of tenants."""
