"""The command line: a group that finds its commands by entry point."""
