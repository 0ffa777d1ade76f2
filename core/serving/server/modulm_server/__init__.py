"""The HTTP server: everything around the routes, and what route families share."""
