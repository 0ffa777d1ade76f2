"""What GPU platforms share: graphs of recorded steps, asynchronous copies, memory."""
