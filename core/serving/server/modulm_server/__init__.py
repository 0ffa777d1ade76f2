"""The HTTP server: the application, its limits and security, and the SDK of route families."""
