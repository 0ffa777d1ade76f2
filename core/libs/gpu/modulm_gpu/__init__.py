"""What GPU platforms share: graphs of recorded steps, copies beside the work, memory."""
